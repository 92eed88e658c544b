"""Which start rank belongs to which replica."""

from __future__ import annotations

import pytest

from megatron_recover.collectives.layout import Layout
from megatron_recover.errors import UserError


def layout(hosts: str, replica_size: int) -> Layout:
    """One rank for each letter, which names its host."""
    return Layout.from_hosts([(host, 100 + n, "") for n, host in enumerate(hosts)], replica_size)


def test_on_one_host_replicas_are_contiguous_ranks() -> None:
    one = layout("aaaaaa", 2)
    assert [one.ranks_of(replica) for replica in range(one.num_replicas)] == [(0, 1), (2, 3), (4, 5)]
    assert [one.replica_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [one.coordinate_of(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]


def test_ranks_dealt_out_in_turn_are_gathered_by_host() -> None:
    cyclic = layout("abcabc", 2)
    assert [cyclic.ranks_of(replica) for replica in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert cyclic.places[4].local_rank == 1


def test_whole_replicas_and_closed_losses() -> None:
    one = layout("aaaaaa", 2)
    assert one.whole_replicas([0, 1, 3, 4, 5]) == (0, 2)
    assert not one.is_closed([2])
    assert one.is_closed([2, 3])
    assert one.is_closed([])


@pytest.mark.parametrize("size", [0, 4])
def test_sizes_that_do_not_fit_are_refused(size: int) -> None:
    with pytest.raises(UserError, match="6 ranks cannot be cut into replicas"):
        layout("aaaaaa", size)
