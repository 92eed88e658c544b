"""Who runs which microbatch of one iteration: the plan that every replica computes for itself.

A plan is made by a policy (:mod:`megatron_recover.workload.policy`) out of arguments that all living
replicas agree on, and is never sent: each process computes it, and ``digest`` lets them compare.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Plan:
    """The microbatches of one iteration, dealt out to the living replicas.

    The mappings are copied into a canonical, read-only form (keys ascending, one entry per living
    replica), so that two plans with the same content are equal and iterate in the same order everywhere.

    Raises:
        ValueError: the plan does not give each of the ids 0..num_microbatches-1 to exactly one living
            replica, or its replicas do not match. That is a bug in a policy, never a user's mistake.
    """

    num_microbatches: int
    """G: global batch size / micro batch size; the ids of the iteration are 0..G-1."""
    alive: tuple[int, ...]
    """Living replicas (start ids), ascending, at least one."""
    ids: Mapping[int, tuple[int, ...]]
    """Replica -> microbatch ids in the order in which it runs them. A replica may have none."""
    roles: Mapping[int, str]
    """Replica -> name of its role, for telemetry and for the policy's own ``reassign``."""

    def __post_init__(self) -> None:
        alive = normalize_alive(self.alive)
        living = set(alive)
        if not living.issuperset(self.ids):
            raise ValueError(f"plan gives ids to {sorted(set(self.ids) - living)}, which are not alive")
        if living != set(self.roles):
            raise ValueError(f"plan names roles for {sorted(self.roles)}, but {list(alive)} are alive")
        # The fields are frozen for users of the plan; this is the one place that writes them.
        object.__setattr__(self, "num_microbatches", check_num_microbatches(self.num_microbatches))
        object.__setattr__(self, "alive", alive)
        object.__setattr__(
            self, "ids", MappingProxyType({r: tuple(map(operator.index, self.ids.get(r, ()))) for r in alive})
        )
        object.__setattr__(self, "roles", MappingProxyType({r: self.roles[r] for r in alive}))
        self._check_each_id_once()

    def _check_each_id_once(self) -> None:
        dealt = sorted(i for ids in self.ids.values() for i in ids)
        if dealt == list(range(self.num_microbatches)):
            return
        wanted = set(range(self.num_microbatches))
        twice = sorted({a for a, b in pairwise(dealt) if a == b})
        raise ValueError(
            f"plan does not hold the ids 0..{self.num_microbatches - 1} once each: missing "
            f"{sorted(wanted - set(dealt))}, more than once {twice}, unknown {sorted(set(dealt) - wanted)}"
        )

    def ids_of(self, replica: int) -> tuple[int, ...]:
        """Microbatch ids of a living replica, in the order in which it runs them.

        Raises:
            KeyError: the replica is not alive in this plan.
        """
        return self.ids[replica]

    def digest(self) -> int:
        """Fingerprint of everything in the plan, 0 <= digest < 2**64 (unsigned).

        Equal plans have equal digests in every process, on every machine and Python version: it is a
        BLAKE2b hash of a canonical text and does not use Python's salted ``hash``.
        """
        rows = [[r, self.ids[r], self.roles[r]] for r in self.alive]
        text = json.dumps([self.num_microbatches, rows], separators=(",", ":"))
        return int.from_bytes(hashlib.blake2b(text.encode("ascii"), digest_size=8).digest(), "big")

    def __hash__(self) -> int:
        return self.digest()

    def __reduce__(self) -> tuple[type[Plan], tuple[object, ...]]:
        # Read-only mapping views cannot be pickled or deep-copied; plain dicts can.
        return Plan, (self.num_microbatches, self.alive, dict(self.ids), dict(self.roles))


def check_num_microbatches(num_microbatches: int) -> int:
    """The count as a plain int.

    Raises:
        ValueError: smaller than 1.
    """
    count = operator.index(num_microbatches)
    if count < 1:
        raise ValueError(f"an iteration has at least one microbatch, got num_microbatches={count}")
    return count


def normalize_alive(alive: Iterable[int], num_replicas: int | None = None) -> tuple[int, ...]:
    """Replica ids, given in any order and any container, as an ascending tuple of plain ints.

    Raises:
        ValueError: none alive, an id twice, a negative id, or one that is not below ``num_replicas``.
    """
    replicas = tuple(sorted(map(operator.index, alive)))
    if not replicas:
        raise ValueError("no replica is alive")
    if len(set(replicas)) != len(replicas):
        raise ValueError(f"a replica is named twice in {list(replicas)}")
    if replicas[0] < 0 or (num_replicas is not None and replicas[-1] >= num_replicas):
        limit = "" if num_replicas is None else f" (the job started with {num_replicas})"
        raise ValueError(f"no such replica among {list(replicas)}{limit}")
    return replicas


def split_survivors(plan: Plan, alive: Iterable[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``(survivors, lost)`` of a plan, both ascending, where ``alive`` lists the survivors in any order.

    Raises:
        ValueError: nobody survives, or a survivor is not part of the plan.
    """
    survivors = normalize_alive(alive)
    living = set(survivors)
    if not living.issubset(plan.alive):
        raise ValueError(f"replicas {sorted(living - set(plan.alive))} are not part of the plan")
    return survivors, tuple(r for r in plan.alive if r not in living)


def pad_to_schedule(count: int, pipeline_size: int, group_size: int | None = None) -> int:
    """How many units a replica must run so that an interleaved pipeline schedule takes its ``count``.

    Megatron's interleaved schedule refuses a number of microbatches below its group size, and one whose
    remainder by the group size is neither 0 nor at least the pipeline size. The result is the smallest
    number >= ``count`` that it takes; the units beyond ``count`` are padding of weight zero. A replica
    with nothing to run stays at 0: it does not enter the schedule at all.

    Args:
        count: microbatches that the replica has in this round.
        pipeline_size: stages of the pipeline (PP).
        group_size: Megatron's ``microbatch_group_size_per_vp_stage``; its default is the pipeline size.

    Raises:
        ValueError: a negative count, a pipeline of no stage, or a group smaller than the pipeline (which
            Megatron refuses too).
    """
    group = pipeline_size if group_size is None else group_size
    if count < 0 or pipeline_size < 1 or group < pipeline_size:
        raise ValueError(f"cannot pad {count=} for {pipeline_size=} and group_size={group}")
    if count == 0:
        return 0
    units = max(count, group)
    remainder = units % group
    # Remainders 1..PP-1 are refused, so the next number taken has remainder PP (which is 0 when group == PP).
    return units + pipeline_size - remainder if 0 < remainder < pipeline_size else units
