"""The invariant of a commit, checked on plain data."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_recover.errors import ReplicasDiffer
from megatron_recover.recovery import Contribution, check_contributions


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
