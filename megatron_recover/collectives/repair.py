"""Repair of world and cross-replica group after a death (design section 3, facts measured on Open MPI 5.0).

    revoke both -> settle -> shrink each by itself -> agree on each new one -> loop until clean and whole

Only calls that are known to outlive a death at any moment are used. The order is the same on every rank,
and each loop is entered and left by an agreement, so no rank can be in another step than its peers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_recover.collectives import membership
from megatron_recover.collectives.runtime import Communicators

if TYPE_CHECKING:
    from mpi4py import MPI

SETTLE_S = 0.05
"""The set of failed ranks must have been still for this long before Shrink: without it, a death while
Shrink runs crashes about 1 repair in 30; with it 0 in 120 (measured)."""

CLOSURE_S = 5.0
"""How long to wait for orphans to leave before shrinking all the same."""


@dataclass(frozen=True)
class Repair:
    """What one repair did. The same on every survivor, but for the times."""

    epoch: int
    """The new epoch."""
    ranks_lost: tuple[int, ...]
    """Start ranks that were alive in the epoch before and are not now: the dead and the orphans."""
    replicas_lost: tuple[int, ...]
    alive: tuple[int, ...]
    """Living replicas, sorted."""
    noticed_at: float
    """Wall time (unix seconds) at which this process noticed the failure."""
    settle_s: float
    repair_s: float
    """From the notice to the agreed new world, settling included."""


class Orphaned(Exception):
    """This process is alive but its replica lost a member: it has to leave."""


def revoke(comms: Communicators) -> None:
    """Wakes every peer that is inside a collective. Never raises."""
    from mpi4py import MPI

    for comm in (comms.cross, comms.world):
        with contextlib.suppress(MPI.Exception):
            comm.Revoke()


@contextlib.contextmanager
def deadline(seconds: float, give_up: Callable[[], None]) -> Iterator[None]:
    """Last resort: past ``seconds`` all stacks go to stderr and ``give_up`` ends the process.

    Should even that not run (the GIL is held), faulthandler's own thread ends the process a little later.
    """

    def expire() -> None:
        faulthandler.dump_traceback(all_threads=True)
        give_up()

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + 10, exit=True)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def settle(comms: Communicators, heartbeat: Callable[[], None]) -> float:
    """Waits until the failed set is still and contains whole replicas only.

    Orphans leave by themselves as soon as their engine sees the failure; waiting for that here saves a
    second shrink.

    Returns:
        Seconds waited.

    Raises:
        Orphaned: a member of this process's own replica is dead.
    """
    begin = last_change = time.monotonic()
    known: tuple[int, ...] = ()
    while True:
        heartbeat()
        now = time.monotonic()
        lost = membership.failed(comms.world, comms.start)
        if lost != known:
            known, last_change = lost, now
        if any(comms.layout.replica_of(rank) == comms.replica for rank in lost):
            raise Orphaned
        still = now - last_change >= SETTLE_S
        if still and (comms.layout.is_closed(_lost_since_start(comms, lost)) or now - begin > CLOSURE_S):
            return now - begin
        time.sleep(0.002)


def _shrink(comm: MPI.Intracomm) -> MPI.Intracomm:
    from mpi4py import MPI

    small: MPI.Intracomm = comm.Shrink()  # type: ignore[assignment]  # mpi4py declares its base class
    small.Set_errhandler(MPI.ERRORS_RETURN)
    return small


def _lost_since_start(comms: Communicators, lost: tuple[int, ...]) -> list[int]:
    here = set(membership.members(comms.world, comms.start)) - set(lost)
    return [rank for rank in range(comms.layout.num_ranks) if rank not in here]


def repair(
    comms: Communicators,
    epoch: int,
    *,
    noticed_at: float,
    heartbeat: Callable[[], None],
    at_step: Callable[[int], None] = lambda step: None,
    deadline_s: float,
    give_up: Callable[[], None],
) -> Repair:
    """Replaces ``comms.world`` and ``comms.cross`` by ones in which every replica is whole.

    Collective over all living ranks; each must have agreed (on the old world) that a repair begins.

    Args:
        comms: changed in place.
        epoch: the epoch that is gone.
        noticed_at: wall time at which the failure was noticed here.
        heartbeat: called while waiting, drives MPI's progress.
        at_step: called with 0 at the begin, 1 before each shrink, 2 between it and the agreement, 3 at the end.
        deadline_s: past this the process dumps its stacks and ends.
        give_up: ends the process then.

    Raises:
        Orphaned: this process belongs to a replica that lost a member.
    """
    from mpi4py import MPI

    before = set(membership.members(comms.world, comms.start))
    settled = 0.0
    with deadline(deadline_s, give_up):
        at_step(0)
        while True:
            revoke(comms)
            settled += settle(comms, heartbeat)
            at_step(1)
            clean = 1
            try:
                comms.world = _shrink(comms.world)
            except MPI.Exception:
                clean = 0
            try:
                comms.cross = _shrink(comms.cross)
                at_step(2)
                clean &= comms.cross.Agree(clean)
            except MPI.Exception:
                clean = 0
            try:
                clean = comms.world.Agree(clean)
            except MPI.Exception:
                clean = 0
            if not clean:
                continue
            present = membership.members(comms.world, comms.start)
            alive = comms.layout.whole_replicas(present)
            if comms.replica not in alive:
                raise Orphaned
            if len(alive) * comms.layout.replica_size == len(present):
                break  # otherwise orphans are in it; they leave now, and the next turn drops them
        at_step(3)
    lost = tuple(sorted(before - set(present)))
    return Repair(
        epoch=epoch + 1,
        ranks_lost=lost,
        replicas_lost=tuple(sorted({comms.layout.replica_of(rank) for rank in lost})),
        alive=alive,
        noticed_at=noticed_at,
        settle_s=settled,
        repair_s=time.time() - noticed_at,
    )
