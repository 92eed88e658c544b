"""The engine thread: the only thread of a process that calls MPI once training runs.

The training thread posts operations and waits on futures. The engine carries them out in order, watches
for deaths in between (and while it waits for peers), and repairs at once, whatever the training thread is
doing. A repair takes the *epoch* of every operation that was posted for the old one: those return
``None`` without touching their result, and the session above runs another round.

What keeps all ranks in step: the only collectives on the world are agreements (and the shrinks that
follow a failed one). Whoever sees a failure revokes, and then takes part in the *next* agreement with
"repairing"; whoever is in that agreement for another reason learns it from the result. So repairs and
commits are ordered alike on every rank.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_recover.collectives import membership
from megatron_recover.collectives.exchange import Exchange
from megatron_recover.collectives.neighbours import Neighbours
from megatron_recover.collectives.repair import Orphaned, Repair, deadline, repair, revoke
from megatron_recover.collectives.runtime import Communicators

POLL_S = 0.02
"""An idle engine looks for failures this often; that also drives MPI's progress."""

CHUNK_BYTES = 1 << 28
"""A bucket is reduced in pieces of this size: MPI counts are C ints, and a repair need not wait for 8 GB."""

REPAIR_DEADLINE_S = 60.0

_PREPARING = 0.5
"""Share of the time to move data in which a rank must be ready for it: one that hangs there leaves before its peers,
which wait for it inside the all-reduce, take themselves for hung."""

_OK, _RUNNING, _VOTES = 1, 2, 2
_VOTE_BITS = 24


@dataclass(frozen=True)
class Attempt:
    """Outcome of an agreement over the world. The same on every living rank."""

    ok: bool
    """Every living rank said yes, for the epoch that is current."""
    epoch: int
    alive: tuple[int, ...]
    """Living replicas, all of whose ranks took part."""
    votes: int
    """Bitwise OR of what the ranks voted."""


@dataclass
class Reduction:
    """One bucket: ``result`` becomes the sum of ``send()`` over the cross-replica group.

    The array that ``send`` returns is only read (out of place), so a reduction can be repeated.
    """

    send: Callable[[], NDArray[Any]]
    """Called on the engine thread when its turn comes; a flat contiguous array."""
    result: NDArray[Any]
    before: Callable[[], None] = field(default=lambda: None)
    """Called on the engine thread when all peers are there, just before data moves."""


class _EpochGone(Exception):
    """A member of the world is dead, or a peer has revoked it."""


class Engine:
    """Owns the communicators of a process. All public methods are for the training thread.

    Args:
        comms: from ``runtime.start``.
        on_repair: called on the engine thread after each repair, before any operation of the new epoch.
        on_repair_step: called on the engine thread inside a repair, with 0 to 3 (see ``repair.repair``).
        on_orphaned: called on the engine thread when this process has to leave; must not return.
        on_give_up: called with the reason when waiting has no sense any more; must end the process.
        moving: ``moving(share)`` is a context, to be watched over, in which data is moved between ranks that are all
            there (share 1), or in which this rank prepares for it (a smaller share of the time).
        repair_deadline_s: a repair that takes longer is given up.
    """

    def __init__(
        self,
        comms: Communicators,
        *,
        on_repair: Callable[[Repair], None] = lambda report: None,
        on_repair_step: Callable[[int], None] = lambda step: None,
        on_orphaned: Callable[[], None] = lambda: os._exit(0),
        on_give_up: Callable[[str], None] = lambda reason: os._exit(1),
        moving: Callable[[float], contextlib.AbstractContextManager[None]] = lambda share: contextlib.nullcontext(),
        repair_deadline_s: float = REPAIR_DEADLINE_S,
    ) -> None:
        self.comms = comms
        self.epoch = 0
        self.alive: tuple[int, ...] = tuple(range(comms.layout.num_replicas))
        self._on_repair = on_repair
        self._on_repair_step = on_repair_step
        self._moving = moving
        self._on_orphaned = on_orphaned
        self._on_give_up = on_give_up
        self._repair_deadline_s = repair_deadline_s
        self._exchange = Exchange()
        self._neighbours = Neighbours(comms.layout, comms.rank)
        self._wakeup = threading.Condition()
        self._queue: collections.deque[Callable[[], None] | None] = collections.deque()
        self._noticed_at = 0.0
        self._failure: tuple[int, Exception] | None = None
        self._abandoned: list[Any] = []
        self._is_closing = self._is_closed = False
        self._thread = threading.Thread(target=self._main, name="recover-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread. From here on no other thread may call MPI."""
        self._thread.start()

    def closing(self) -> None:
        """The next agreement is the last one: from now on it is no failure when others have left."""
        self._is_closing = True

    def close(self) -> None:
        """Ends the thread after what is queued. Failures are no longer looked for afterwards."""
        self._post(None)
        self._thread.join()

    def all_reduce(self, task: Reduction, epoch: int) -> Future[bool]:
        """Sums a bucket over the cross-replica group. False: the epoch is gone, the result is undefined.

        Every living rank of the coordinate must post the same reductions in the same order.
        """
        done: Future[bool] = Future()
        self._post(lambda: self._in_epoch(epoch, done, lambda: self._reduce(task), False))
        return done

    def exchange(self, payload: bytes, epoch: int) -> Future[dict[int, bytes] | None]:
        """Gathers ``payload`` over the cross-replica group: replica -> payload; None: the epoch is gone."""
        done: Future[dict[int, bytes] | None] = Future()
        self._post(lambda: self._in_epoch(epoch, done, lambda: self._gather(payload), None))
        return done

    def attempt(self, ok: bool, epoch: int, votes: int = 0) -> Future[Attempt]:
        """Agreement over the world; completes when every living rank has come to it, repairs included.

        Args:
            ok: this rank's yes or no; counts as no when ``epoch`` is not current any more.
            epoch: the epoch in which the work to be agreed on was done.
            votes: up to 24 bits, OR-ed over the world.
        """
        done: Future[Attempt] = Future()
        self._post(lambda: self._attempt(ok, epoch, votes, done))
        return done

    # ---- engine thread ----------------------------------------------------------------------------

    def _post(self, operation: Callable[[], None] | None) -> None:
        with self._wakeup:
            self._queue.append(operation)
            self._wakeup.notify()

    def _main(self) -> None:
        try:
            while True:
                with self._wakeup:
                    if not self._queue:
                        self._wakeup.wait(POLL_S)
                    operation = self._queue.popleft() if self._queue else self._look
                if operation is None:
                    return
                operation()
        except Orphaned:
            self._on_orphaned()
        except BaseException:
            # The engine is the process's hold on the world. Without it the process must not live on.
            traceback.print_exc()
            os.kill(os.getpid(), 9)

    def _look(self) -> None:
        if self._is_closed:
            return  # others have left, or are about to
        try:
            self._raise_if_broken()
        except _EpochGone:
            self._join_repair()

    def _look_at_neighbours(self) -> None:
        gone = self._neighbours.gone()
        if gone:  # a repair may take its time (it waits for a rank that is stopped); what MPI knows is its affair
            known = membership.failed(self.comms.start, self.comms.start)
            gone = tuple(rank for rank in gone if rank not in known)
        if gone and not self._is_closing:
            self._on_give_up(
                f"rank {', '.join(map(str, gone))} has ended without MPI noticing (with a non-zero exit code), which "
                "cannot be repaired; resume from the last checkpoint"
            )

    def _progress(self) -> None:
        from mpi4py import MPI

        MPI.COMM_SELF.Iprobe()

    def _raise_if_broken(self) -> None:
        self._progress()
        self._look_at_neighbours()
        world = self.comms.world
        lost = membership.failed(world, self.comms.start)
        if any(self.comms.layout.replica_of(rank) == self.comms.replica for rank in lost):
            raise Orphaned
        if lost or world.Is_revoked() or self.comms.cross.Is_revoked():
            raise _EpochGone

    def _in_epoch(self, epoch: int, done: Future[Any], work: Callable[[], Any], gone: Any) -> None:
        from mpi4py import MPI

        outcome = gone
        if self._failure is not None and self._failure[0] == epoch:
            # Peers may be waiting in the operation that failed here: none that follows it can be carried out.
            done.set_exception(self._failure[1])
            return
        if epoch == self.epoch:
            try:
                self._raise_if_broken()
                outcome = work()
            except (MPI.Exception, _EpochGone):
                self._join_repair()
            except Orphaned:
                raise
            except Exception as error:  # the training thread's affair (an injected fault, a bad bucket)
                self._failure = (epoch, error)
                done.set_exception(error)
                return
        done.set_result(outcome)

    def _wait(self, request: Any, keep: Any = None, *, watch: bool = True) -> None:
        """Polls ``request``; sleeping while peers are not there yet leaves the cores to their training."""
        turns, next_look = 0, time.monotonic() + 0.005
        while not request.Test():
            turns += 1
            if turns > 50:
                time.sleep(5e-5 if turns < 200 else 3e-4)
            if turns % 64 == 0:
                self._look_at_neighbours()
            if watch and time.monotonic() > next_look:
                try:
                    self._raise_if_broken()
                except _EpochGone:
                    # MPI may still read or write these until the revocation has gone round.
                    self._abandoned.append((request, keep))
                    raise
                next_look = time.monotonic() + 0.005

    def _reduce(self, task: Reduction) -> bool:
        with self._moving(_PREPARING):
            send = task.send()
        # Peers arrive at different times: waiting in a barrier that sleeps, and only then moving data at
        # full speed, keeps a waiting rank from taking a core away from one that computes.
        self._wait(self.comms.cross.Ibarrier(), keep=(send, task.result))
        with self._moving(_PREPARING):
            task.before()
        self._move(send, task.result)
        return True

    def _move(self, send: NDArray[Any], result: NDArray[Any]) -> None:
        step = max(1, CHUNK_BYTES // send.itemsize)
        try:
            for begin in range(0, send.size, step):
                piece = slice(begin, begin + step)
                with self._moving(1.0):
                    self.comms.cross.Allreduce(send[piece], result[piece])
        except BaseException:
            # Parts of an all-reduce that failed may still be in flight: freeing their memory now crashes.
            self._abandoned.append((send, result))
            raise

    def _gather(self, payload: bytes) -> dict[int, bytes]:
        parts = self._exchange.gather(self.comms.cross, payload, self._wait)
        return dict(zip(self.alive, parts, strict=True))

    def _agree(self, bits: int) -> int | None:
        """Bitwise AND over the world; None when a member is dead (on every living rank alike)."""
        from mpi4py import MPI

        flag: NDArray[np.int32] = np.array([bits], dtype=np.int32)
        try:
            self._wait(self.comms.world.Iagree(flag), keep=flag, watch=False)
        except MPI.Exception:
            return None
        return int(flag[0])

    def _attempt(self, ok: bool, epoch: int, votes: int, done: Future[Attempt]) -> None:
        mask = (1 << _VOTE_BITS) - 1
        while True:
            try:
                self._raise_if_broken()
                if self._failure is not None and self._failure[0] == self.epoch:
                    raise _EpochGone  # the training thread lives with it: its peers must not wait in what failed
            except _EpochGone:
                self._join_repair()
                continue
            yes = _OK if ok and epoch == self.epoch else 0
            agreed = self._agree(yes | _RUNNING | ((~votes & mask) << _VOTES))
            if agreed is None or not agreed & _RUNNING:
                self._repair()
                continue
            voted = ~(agreed >> _VOTES) & mask
            self._is_closed = self._is_closing
            self._abandoned.clear()  # every living rank is in this epoch: nothing old is in flight
            done.set_result(Attempt(bool(agreed & _OK), self.epoch, self.alive, voted))
            return

    def _join_repair(self) -> None:
        """A failure seen outside an agreement: wake the others and enter the next agreement with a no."""
        self._noticed_at = time.time()
        revoke(self.comms)
        with deadline(self._repair_deadline_s, self._repair_hangs):
            self._agree(0)
        self._repair()

    def _repair_hangs(self) -> None:
        self._on_give_up("a repair did not come to its end before the deadline; resume from the last checkpoint")

    def _repair(self) -> None:
        report = repair(
            self.comms,
            self.epoch,
            noticed_at=self._noticed_at or time.time(),
            heartbeat=self._progress,
            at_step=self._on_repair_step,
            deadline_s=self._repair_deadline_s,
            give_up=self._repair_hangs,
        )
        self._noticed_at = 0.0
        self._neighbours.forget(report.ranks_lost)
        # A gather that failed may have grown the slots on some members only: all start again alike.
        self._exchange = Exchange()
        self.epoch, self.alive = report.epoch, report.alive
        with self._moving(1.0):
            self._on_repair(report)
