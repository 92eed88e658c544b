"""The default policy: every living replica does the same share, lost work goes to the least loaded."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from megatron_recover.workload.plan import Plan, check_num_microbatches, normalize_alive, split_survivors

WORKER = "worker"


@dataclass(frozen=True, slots=True)
class BalancedPolicy:
    """Microbatch ``j`` to the ``(j mod W)``-th of the W living replicas; lost ids to the least loaded.

    With all replicas alive and G divisible by W this is what Megatron's own sampler does: microbatch k
    of data-parallel rank r is id k*W + r.

    Loads (ids per replica) differ by at most one, always. After ``assign`` they are ceil(G/W) or
    floor(G/W). ``reassign`` starts from a subset of such loads, so from some x and x+1, and adds ids one
    at a time to a replica of smallest load: while any replica is at x an x becomes x+1, and once none
    is, the loads are all equal and the argument starts again from x+1. Hence after any number of losses
    the longest share is ceil(G/W) for the W that are left, which no other split can beat.

    The policy keeps no state; both methods depend on their arguments only.
    """

    name: ClassVar[str] = "balanced"

    num_replicas: int | None = None
    """Replicas at the start of the job; ids at or above it are refused. None: not checked."""

    def assign(self, num_microbatches: int, alive: Iterable[int]) -> Plan:
        """The plan at the start of an iteration.

        Raises:
            ValueError: no microbatch, nobody alive, or a replica id that cannot be.
        """
        count = check_num_microbatches(num_microbatches)
        replicas = normalize_alive(alive, self.num_replicas)
        size = len(replicas)
        ids = {r: tuple(range(k, count, size)) for k, r in enumerate(replicas)}
        return Plan(count, replicas, ids, dict.fromkeys(replicas, WORKER))

    def reassign(self, plan: Plan, alive: Iterable[int]) -> Plan:
        """The plan after a loss: survivors keep their ids and order, lost ids are appended to the least
        loaded (ties: lowest replica id), in ascending order of id. Nobody lost: the plan as it is.

        Raises:
            ValueError: nobody survives, or a survivor is not part of the plan.
        """
        survivors, lost = split_survivors(plan, alive)
        if not lost:
            return plan
        ids = {r: list(plan.ids[r]) for r in survivors}
        loads = [(len(ids[r]), r) for r in survivors]
        heapq.heapify(loads)
        for microbatch in sorted(i for r in lost for i in plan.ids[r]):
            load, replica = loads[0]
            ids[replica].append(microbatch)
            heapq.heapreplace(loads, (load + 1, replica))
        return Plan(
            plan.num_microbatches,
            survivors,
            {r: tuple(i) for r, i in ids.items()},
            dict.fromkeys(survivors, WORKER),
        )
