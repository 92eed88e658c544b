"""What each replica tells the others before a commit, and the checks that make a wrong one impossible."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_recover.errors import ReplicasDiffer


@dataclass
class Contribution:
    """One rank's part of an iteration. Plain data only: it is pickled between our own processes."""

    iteration: int
    num_microbatches: int
    plan: int
    """Digest of the plan this rank followed, all takeovers included."""
    ids: list[int] = field(default_factory=list)
    """Microbatches whose gradient is in this rank's buckets."""
    records: dict[int, Any] = field(default_factory=dict)
    """Microbatch id -> what the training loop wants to keep of it (losses)."""
    sums: dict[str, float] = field(default_factory=dict)
    """Named numbers to be added over replicas (token counts)."""
    fingerprint: tuple[Any, ...] = ()
    """What must be the same on every replica: last gradient norm, sometimes a parameter hash."""

    def pack(self) -> bytes:
        return pickle.dumps(self, protocol=pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def unpack(data: bytes) -> Contribution:
        contribution = pickle.loads(data)
        assert isinstance(contribution, Contribution)
        return contribution


def check_contributions(parts: Mapping[int, Contribution]) -> None:
    """The invariant of a commit: each microbatch exactly once, one plan, equal replicas.

    Args:
        parts: replica id -> contribution, for every living replica.

    Raises:
        ReplicasDiffer: naming what differs and on which replicas. Every living rank of the coordinate
            sees the same parts, so all raise together.
    """
    for what in ("iteration", "num_microbatches", "plan"):
        _same(what.replace("_", " "), {replica: getattr(part, what) for replica, part in parts.items()})
    total = next(iter(parts.values())).num_microbatches
    seen: dict[int, int] = {}
    for replica, part in parts.items():
        for microbatch in part.ids:
            if microbatch in seen or not 0 <= microbatch < total:
                other = f" and {seen[microbatch]}" if microbatch in seen else ""
                raise ReplicasDiffer(
                    f"microbatch {microbatch} of {total} was run by replica {replica}{other}: "
                    "each must be run exactly once"
                )
            seen[microbatch] = replica
    if len(seen) != total:
        missing = sorted(set(range(total)) - set(seen))
        raise ReplicasDiffer(f"microbatches {missing} of {total} were run by no living replica")
    _same("state (gradient norm, parameters)", {replica: part.fingerprint for replica, part in parts.items()})


def odd_replicas(parts: Mapping[int, Contribution]) -> tuple[int, ...]:
    """Replicas whose state is another than that of a majority of three or more; empty where there is none.

    Without a majority nobody can say who is right, and ``check_contributions`` raises.
    """
    counts = Counter(part.fingerprint for part in parts.values())
    usual, count = counts.most_common(1)[0]
    if 2 * count <= len(parts):
        return ()
    return tuple(sorted(replica for replica, part in parts.items() if part.fingerprint != usual))


def _same(what: str, values: Mapping[int, Any]) -> None:
    groups: dict[Any, list[int]] = {}
    for replica, value in values.items():
        groups.setdefault(value, []).append(replica)
    if len(groups) > 1:
        said = "; ".join(f"replicas {replicas}: {value}" for value, replicas in groups.items())
        raise ReplicasDiffer(f"replicas that must be equal have a different {what} ({said})")
