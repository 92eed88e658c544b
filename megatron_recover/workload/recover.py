"""The policy of the ReCoVer paper (arXiv 2605.11215, section 4.3, algorithms 6 and 7) over shared ids.

In the paper a replica has a slice of the data of its own, counts what it contributes, and drops the slice
of a lost replica; its spares compute like the majors and zero their gradient, so that promoting one is
free. Here microbatches are addressed by id and none is dropped. Which ids a spare would have to compute in
advance depends on which replica will be lost, so a spare holds no ids until it is promoted, and idles. An
iteration without a failure takes the same time either way: the majors set its length. A promotion costs
what the paper's does not: the promoted spare starts from nothing and runs the whole share of the lost
replica (G_cur microbatches) while all others wait. ``balanced`` spreads that same share over everybody.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from megatron_recover.workload.plan import Plan, check_num_microbatches, normalize_alive, split_survivors

MAJOR = "major"
MINOR = "minor"
MAJOR_SPARE = "major-spare"
MINOR_SPARE = "minor-spare"
BOUNDARY_MINOR = "boundary-minor"

ROLES = (MAJOR, MINOR, MAJOR_SPARE, MINOR_SPARE, BOUNDARY_MINOR)


@dataclass(frozen=True, slots=True)
class Layout:
    """How many replicas have which role at the start of an iteration (the paper's algorithm 7)."""

    major_quota: int
    """G_cur: microbatches of a major, the smallest number with W * G_cur >= G."""
    minor_quota: int
    """R_cur: microbatches of the minor, 0 <= R_cur < G_cur."""
    num_majors: int
    num_minors: int
    """1 if R_cur > 0, else 0."""
    num_major_spares: int
    num_minor_spares: int
    """1 if there is a minor and at least two replicas are left over, else 0."""


def layout_of(num_microbatches: int, num_alive: int) -> Layout:
    """The layout of ``num_microbatches`` (G, the paper's B) over ``num_alive`` (W) replicas."""
    quota = -(-num_microbatches // num_alive)
    num_majors, rest = divmod(num_microbatches, quota)
    num_minors = 1 if rest else 0
    # num_majors + num_minors = ceil(G / G_cur) <= W because W * G_cur >= G, so this is never negative.
    num_spares = num_alive - num_majors - num_minors
    num_minor_spares = 1 if num_minors and num_spares >= 2 else 0
    return Layout(quota, rest, num_majors, num_minors, num_spares - num_minor_spares, num_minor_spares)


@dataclass(frozen=True, slots=True)
class RecoverPolicy:
    """Majors, at most one minor, spares; a boundary step when the spares do not suffice.

    Start of an iteration: see :func:`layout_of`. Roles go to the living replicas in ascending order:
    majors, the minor, major-spares, the minor-spare. Ids are dealt out in rounds over the majors and the
    minor, so with G divisible by W this is the same plan as ``balanced``.

    Loss inside an iteration:

    1. *Promotion*, if there are as many major-spares as lost majors and as many minor-spares as lost
       minors: each lost replica's ids go whole to one spare of its role, which takes over the role.
       (The paper compares the number of spares with zero instead; two majors lost with one spare then
       leave the batch short.)
    2. *Boundary* otherwise. All spares, whatever their role, are used first, each for one whole lost
       share, the largest shares first. (The paper ends the zeroing of the other role's spares without
       counting them, and the batch comes out too large.) The D ids left over are spread over all W
       survivors: G_ext is the smallest number with W * G_ext >= D, and n_bdry = W * G_ext - D of them,
       the boundary minors, take one less than G_ext. The least loaded take the larger share. If the
       spares suffice, D and G_ext are 0. No spare is left after a spread, so every later loss in the
       same iteration is spread too.

    No history is needed. The paper recomputes G_cur only after a boundary, as the smallest number with
    W * G_cur >= G; here it is computed at every start as ceil(G/W). Both are the same: the paper's start
    has W_0 * G_0 = G, so G_0 = ceil(G/W_0), and a boundary sets G_cur = ceil(G/W). Between boundaries W only
    falls, so ceil(G/W) does not fall below G_cur; and no boundary means that all shares still
    lie on living replicas, at most G_cur on each, so W * G_cur >= G and ceil(G/W) does not exceed G_cur
    either. For the same reason G_cur never decreases while G stays and W falls. So the plan depends only
    on (G, living replicas), and a process that starts late, or again from a checkpoint, computes the
    same. The one visible difference: after a promotion the next iteration lays the roles out afresh
    (a single spare left beside a minor is then a major-spare) where the paper leaves them.
    """

    name: ClassVar[str] = "recover"

    num_replicas: int | None = None
    """Replicas at the start of the job; ids at or above it are refused. None: not checked."""

    def assign(self, num_microbatches: int, alive: Iterable[int]) -> Plan:
        """The plan at the start of an iteration.

        Raises:
            ValueError: no microbatch, nobody alive, or a replica id that cannot be.
        """
        count = check_num_microbatches(num_microbatches)
        replicas = normalize_alive(alive, self.num_replicas)
        layout = layout_of(count, len(replicas))
        names = (
            [MAJOR] * layout.num_majors
            + [MINOR] * layout.num_minors
            + [MAJOR_SPARE] * layout.num_major_spares
            + [MINOR_SPARE] * layout.num_minor_spares
        )
        majors, working = layout.num_majors, layout.num_majors + layout.num_minors
        # Rounds 0..R_cur-1 go over the majors and the minor, the later ones over the majors only.
        shared = layout.minor_quota * working
        ids: dict[int, tuple[int, ...]] = {}
        for k, replica in enumerate(replicas[:working]):
            alone = range(shared + k, count, majors) if k < majors else ()
            ids[replica] = (*range(k, shared, working), *alone)
        return Plan(count, replicas, ids, dict(zip(replicas, names, strict=True)))

    def reassign(self, plan: Plan, alive: Iterable[int]) -> Plan:
        """The plan after a loss: survivors keep their ids and order, lost ids are appended by promotion
        or boundary (see the class). Nobody lost: the plan as it is.

        Raises:
            ValueError: nobody survives, a survivor is not part of the plan, or the plan has a role that
                this policy does not know (another policy made it).
        """
        survivors, lost = split_survivors(plan, alive)
        if not set(plan.roles.values()).issubset(ROLES):
            raise ValueError(f"this plan was not made by the policy {self.name!r}: {dict(plan.roles)}")
        if not lost:
            return plan
        ids = {r: plan.ids[r] for r in survivors}
        roles = {r: plan.roles[r] for r in survivors}
        promoted = _promotions(plan, survivors, lost)
        for gone, spare in promoted.items():
            ids[spare] = plan.ids[gone]
            roles[spare] = plan.roles[gone]
        left_over = sorted(i for r in lost if r not in promoted for i in plan.ids[r])
        if left_over:
            _spread(left_over, ids, roles)
        return Plan(plan.num_microbatches, survivors, ids, roles)


def _promotions(plan: Plan, survivors: tuple[int, ...], lost: tuple[int, ...]) -> dict[int, int]:
    """Lost replica -> the spare that takes its whole share; lost replicas beyond the spares are absent."""

    def of_role(replicas: tuple[int, ...], role: str) -> list[int]:
        return [r for r in replicas if plan.roles[r] == role]

    majors, minors = of_role(lost, MAJOR), of_role(lost, MINOR)
    major_spares, minor_spares = of_role(survivors, MAJOR_SPARE), of_role(survivors, MINOR_SPARE)
    if len(majors) <= len(major_spares) and len(minors) <= len(minor_spares):
        return dict([*zip(majors, major_spares, strict=False), *zip(minors, minor_spares, strict=False)])
    # Majors first: their shares are the largest, so what is left to spread is as small as whole shares allow.
    return dict(zip(majors + minors, major_spares + minor_spares, strict=False))


def _spread(left_over: list[int], ids: dict[int, tuple[int, ...]], roles: dict[int, str]) -> None:
    """The boundary step, in place: deal the ids in rounds over all replicas of ``ids``, least loaded first.

    Dealing in rounds gives G_ext = ceil(D/W) to the first D mod W of them (to all if that is 0) and
    G_ext - 1 to the other n_bdry.
    """
    order = sorted(ids, key=lambda r: (len(ids[r]), r))
    size = len(order)
    extra = -(-len(left_over) // size)
    for k, replica in enumerate(order):
        taken = tuple(left_over[k::size])
        ids[replica] += taken
        if len(taken) < extra:
            roles[replica] = BOUNDARY_MINOR
        elif roles[replica] == BOUNDARY_MINOR:
            roles[replica] = MAJOR  # it was one behind and now took the full extra share
