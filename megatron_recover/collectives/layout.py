"""Which start rank belongs to which replica. Pure arithmetic, the same on every process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_recover.errors import UserError


@dataclass(frozen=True)
class Place:
    """Where a start rank runs."""

    host: str
    pid: int
    local_rank: int
    """Position among the ranks of its host, by start rank."""
    pid_namespace: str = ""
    """Ranks with the same host and namespace can look up each other's process id."""


@dataclass(frozen=True)
class Layout:
    """Cuts the start ranks, sorted by (host, rank on the host), into replicas of ``replica_size`` ranks.

    On one host these are contiguous ranks. On several hosts it keeps a replica on as few hosts as
    possible however the runtime distributed the ranks.
    """

    places: tuple[Place, ...]
    replica_size: int

    def __post_init__(self) -> None:
        if self.replica_size < 1 or self.num_ranks % self.replica_size:
            raise UserError(
                f"{self.num_ranks} ranks cannot be cut into replicas of {self.replica_size} "
                f"(tensor x pipeline x context parallel size x --recover-shards): "
                f"start a multiple of {self.replica_size} ranks."
            )

    @staticmethod
    def from_hosts(hosts: Sequence[tuple[str, int, str]], replica_size: int) -> Layout:
        """Builds the layout from ``(host, pid, pid namespace)`` of every start rank, in rank order."""
        seen: dict[str, int] = {}
        places = []
        for host, pid, namespace in hosts:
            places.append(Place(host, pid, seen.get(host, 0), namespace))
            seen[host] = seen.get(host, 0) + 1
        return Layout(tuple(places), replica_size)

    @property
    def num_ranks(self) -> int:
        return len(self.places)

    @property
    def num_replicas(self) -> int:
        return self.num_ranks // self.replica_size

    @cached_property
    def _order(self) -> tuple[int, ...]:
        return tuple(
            sorted(range(self.num_ranks), key=lambda r: (self.places[r].host, self.places[r].local_rank))
        )

    @cached_property
    def _position(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self._order)}

    def replica_of(self, rank: int) -> int:
        """Replica id (0..num_replicas-1) of a start rank."""
        return self._position[rank] // self.replica_size

    def coordinate_of(self, rank: int) -> int:
        """Place of a start rank inside its replica (0..replica_size-1)."""
        return self._position[rank] % self.replica_size

    def ranks_of(self, replica: int) -> tuple[int, ...]:
        """Start ranks of a replica, in coordinate order."""
        start = replica * self.replica_size
        return self._order[start : start + self.replica_size]

    def whole_replicas(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Ids of the replicas of which every member is in ``ranks``, sorted."""
        present = set(ranks)
        return tuple(
            replica
            for replica in range(self.num_replicas)
            if all(rank in present for rank in self.ranks_of(replica))
        )

    def is_closed(self, lost: Iterable[int]) -> bool:
        """True when the ranks in ``lost`` are whole replicas, i.e. no orphan is still there."""
        gone = set(lost)
        return all(rank in gone for lost_rank in gone for rank in self.ranks_of(self.replica_of(lost_rank)))
