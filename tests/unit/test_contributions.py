"""The invariant of a commit, checked on plain data."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_recover.errors import ReplicasDiffer
from megatron_recover.recovery import Contribution, check_contributions, odd_replicas
from megatron_recover.recovery.ledger import is_finite


def parts(*ids: list[int], total: int = 4) -> dict[int, Contribution]:
    return {
        replica: Contribution(iteration=3, num_microbatches=total, plan=7, ids=mine, fingerprint=("norm", "0x1p+0"))
        for replica, mine in enumerate(ids)
    }


def test_each_microbatch_exactly_once_is_accepted() -> None:
    check_contributions(parts([0, 2], [1, 3]))
    check_contributions(parts([0, 1, 2, 3], []))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (([0, 2], [1]), r"microbatches \[3\] of 4 were run by no living replica"),
        (([0, 2], [1, 2, 3]), "microbatch 2 of 4 was run by replica 1 and 0"),
        (([0, 2], [1, 3, 4]), "microbatch 4 of 4 was run by replica 1"),
    ],
)
def test_a_lost_doubled_or_unknown_microbatch_is_named(ids: tuple[list[int], ...], message: str) -> None:
    with pytest.raises(ReplicasDiffer, match=message):
        check_contributions(parts(*ids))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": 8}, r"different plan \(replicas \[0\]: 7; replicas \[1\]: 8\)"),
        ({"iteration": 4}, "different iteration"),
        ({"fingerprint": ("norm", "0x1p+1")}, "different state"),
    ],
)
def test_what_differs_is_named_with_its_replicas(change: dict[str, object], message: str) -> None:
    both = parts([0, 2], [1, 3])
    both[1] = dataclasses.replace(both[1], **change)  # type: ignore[arg-type]
    with pytest.raises(ReplicasDiffer, match=message):
        check_contributions(both)


def test_what_is_sent_comes_back_equal() -> None:
    part = parts([0])[0]
    part.records[0] = {"lm loss": [1.5, 2.0]}
    assert Contribution.unpack(part.pack()) == part


def test_the_odd_one_out_needs_a_majority_against_it() -> None:
    def state(*fingerprints: str) -> dict[int, Contribution]:
        return {n: Contribution(1, 4, 0, fingerprint=(f,)) for n, f in enumerate(fingerprints)}

    assert odd_replicas(state("a", "a", "a")) == ()
    assert odd_replicas(state("a", "b", "a")) == (1,)
    assert odd_replicas(state("b", "a", "a", "c", "a")) == (0, 3)
    assert odd_replicas(state("a", "b")) == ()
    assert odd_replicas(state("a", "a", "b", "b")) == ()
    assert odd_replicas(state("a", "b", "c")) == ()


def test_finite_means_every_element_and_large_numbers_are_finite() -> None:
    flat = np.ones(1000, np.float32)
    assert is_finite(flat)
    for value in (np.nan, np.inf, -np.inf):
        flat[999] = value
        assert not is_finite(flat)
    flat[:] = 3e38  # its square is not
    assert is_finite(flat)
    assert is_finite(np.arange(5))
