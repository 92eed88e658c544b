"""The public core: iterations that survive the loss of replicas, for any PyTorch training loop.

    with Session.start(replica_size=1) as session:
        for step in range(1, steps + 1):
            it = session.iteration(step, num_microbatches, buckets)
            for microbatch in it:                 # global ids; after a failure, more of them
                loss = compute(microbatch)
                loss.backward()
                it.record(microbatch, float(loss))
            # here the buckets hold the sum over all microbatches, on every replica alike
            optimizer.step()

Nothing in here knows Megatron; torch is needed only where a bucket is a tensor.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ClassVar

from numpy.typing import NDArray

from megatron_recover.collectives import membership, runtime
from megatron_recover.collectives.engine import Attempt, Engine
from megatron_recover.collectives.repair import Repair
from megatron_recover.collectives.runtime import Communicators
from megatron_recover.errors import ReplicasDiffer, StoppedBySignal, TooFewReplicas
from megatron_recover.faults import Fault, FaultInjector
from megatron_recover.iteration import Iteration, Round
from megatron_recover.lease import own_lease
from megatron_recover.leaving import (
    STOP_FILE,
    give_up,
    leave_as_failed,
    leave_as_orphan,
    leave_in_order,
    withdraw_status,
)
from megatron_recover.observer import Observer, Silent
from megatron_recover.recovery import Bucket
from megatron_recover.timeouts import HEARTBEAT_TIMEOUT_S, PROGRESS_TIMEOUT_S, REPAIR_TIMEOUT_S, SETUP_TIMEOUT_S
from megatron_recover.watchdog import Watchdog
from megatron_recover.workload import Policy, get_policy

__all__ = ["Bucket", "Iteration", "Observer", "Round", "Session", "Silent"]

_DIFFER, _LEAVE, _NOT_FINITE, _STOP = 1, 2, 4, 8
_FIRST_VOTER = 4
_REPLICAS_PER_VOTE = 20
_ENGINE_PHASES = ("reduce", "repair")


class Session:
    """A rank's membership in a job that survives the loss of replicas.

    ``alive``, ``leader`` and ``decisions`` change only when every living rank has come to the same
    agreement, so all ranks read the same values at the same point of their program.

    Args:
        comms: from ``collectives.runtime.start``.
        policy: name of a workload policy.
        min_replicas: with fewer living replicas ``TooFewReplicas`` is raised on all ranks together.
        heartbeat_timeout_s: a rank that gives no sign of life for so long during training is killed.
        progress_timeout_s: a rank whose training thread changes no phase for so long leaves; 0: never.
        setup_timeout_s: the same from here to the first iteration.
        repair_timeout_s: a repair that takes so long ends the job (the launcher starts it again).
        check_finite: look for NaN and Inf in every bucket before it is reduced.
        injector: failure injection.
        observer: telemetry.
        on_orphaned: called (engine thread) when this rank must leave; must not return.
    """

    _current: ClassVar[Session | None] = None

    def __init__(
        self,
        comms: Communicators,
        *,
        policy: str = "balanced",
        min_replicas: int = 1,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        progress_timeout_s: float = PROGRESS_TIMEOUT_S,
        setup_timeout_s: float = SETUP_TIMEOUT_S,
        repair_timeout_s: float = REPAIR_TIMEOUT_S,
        check_finite: bool = True,
        injector: FaultInjector | None = None,
        observer: Observer | None = None,
        on_orphaned: Callable[[], None] = leave_as_orphan,
    ) -> None:
        self.layout = comms.layout
        self.rank, self.replica, self.coordinate = comms.rank, comms.replica, comms.coordinate
        self.policy: Policy = get_policy(policy, num_replicas=self.layout.num_replicas)
        self.min_replicas = min_replicas
        self.check_finite = check_finite
        self.observer: Observer = observer or Silent()
        self.injector = injector or FaultInjector((), self.rank)
        self.current_iteration = 0
        self.decisions: dict[str, bool] = {}
        self.found_not_finite = False
        """Some rank voted at the last agreement that a gradient is NaN or Inf."""
        self.fingerprint: tuple[Any, ...] = ()
        """What must be the same on all ranks of this coordinate at the next commit."""
        self.buffers: dict[int, NDArray[Any]] = {}
        """Result buffers of the last committed iteration, for the next one: not allocated in each."""
        self._voters: dict[str, Callable[[], bool]] = {}
        self.is_ending = False
        """The script is through: what is written down about the end of the job holds."""
        self._closing = False
        self._is_training = False
        self._asked_to_leave = False
        self._asked_to_stop = self._all_stop = False
        self._somebody_leaves = False
        self._leave_as_orphan = on_orphaned
        self.watchdog = Watchdog(
            own_lease(os.environ.get("MEGATRON_RECOVER_JOB_DIR"), self.rank),
            heartbeat_timeout_s=heartbeat_timeout_s,
            progress_timeout_s=progress_timeout_s,
            setup_timeout_s=setup_timeout_s,
            moving_timeout_s=max(repair_timeout_s, 60.0),
            fail=leave_as_failed,
            is_fenced=runtime.peers_detect_silence(),
        )
        self.engine = Engine(
            comms,
            on_repair=self._repaired,
            on_repair_step=lambda step: self.at("repair", step),
            on_orphaned=self._orphaned,
            on_give_up=self._give_up,
            moving=self.watchdog.moving,
            repair_deadline_s=repair_timeout_s,
        )
        self.epoch = self.engine.epoch
        self.alive = self.engine.alive
        self.engine.start()
        Session._current = self

    @classmethod
    def start(cls, replica_size: int = 1, **options: Any) -> Session:
        """Initialises MPI and joins the job. Collective over all ranks; options as for ``Session``.

        Raises:
            UserError: not started under an MPI with ULFM, or sizes that do not fit.
        """
        runtime.check_environment()
        return cls(runtime.start(replica_size), **options)

    @classmethod
    def current(cls) -> Session | None:
        """The session of this process that is not closed, if there is one."""
        return cls._current

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()

    @property
    def leader(self) -> int:
        """The living replica with the lowest id, as of the last agreement."""
        return self.alive[0]

    @property
    def is_leader(self) -> bool:
        return self.replica == self.leader

    def at(self, phase: str, index: int = 0) -> None:
        """Marks that this rank enters a phase; carries out an injected failure that is due there."""
        if phase not in _ENGINE_PHASES:
            self.watchdog.progress()
        self.observer.phase(phase, self.current_iteration, index)
        self.injector.at(phase, self.current_iteration, index)

    def inject(self, phase: str, iteration: int, index: int = 0) -> None:
        """Carries out an injected failure of work that may go on beside the iterations (any thread)."""
        self.injector.at(phase, iteration, index)

    @property
    def pending_faults(self) -> tuple[Fault, ...]:
        """Injected failures of this rank that have not happened."""
        return self.injector.pending

    def vote(self, name: str, voter: Callable[[], bool]) -> None:
        """From now on each agreement also ORs ``voter()`` over all ranks into ``decisions[name]``.

        Every rank has to register the same names in the same order.
        """
        self._voters[name] = voter
        self.decisions[name] = False

    def agree(
        self, ok: bool = True, *, differ: bool = False, not_finite: bool = False, check: bool = True
    ) -> Attempt:
        """Waits until every living rank has come here; updates ``alive``, ``leader`` and ``decisions``.

        Args:
            ok: this rank's yes or no.
            differ: this rank found replicas that differ.
            not_finite: this rank found a gradient that is NaN or Inf.
            check: raise when too few replicas are left.

        Raises:
            TooFewReplicas: on all ranks together.
            ReplicasDiffer: on all ranks together, when one found a difference.
        """
        ballot = [differ, self._asked_to_leave, not_finite, self._asked_to_stop]
        ballot += [bool(voter()) for voter in self._voters.values()]
        attempt = self._attempt(ok, sum(1 << bit for bit, said in enumerate(ballot) if said))
        for bit, name in enumerate(self._voters, start=_FIRST_VOTER):
            self.decisions[name] = bool(attempt.votes >> bit & 1)
        self._somebody_leaves = bool(attempt.votes & _LEAVE)
        self._all_stop = bool(attempt.votes & _STOP)
        self.found_not_finite = bool(attempt.votes & _NOT_FINITE)
        self.observer.agreed()
        if check and attempt.votes & _DIFFER:
            if differ:
                return attempt  # the caller raises what it has found
            raise ReplicasDiffer("another rank found replicas that differ; its message is in the log")
        if check:
            self._check_enough(len(self.alive))
        return attempt

    def _attempt(self, ok: bool, votes: int) -> Attempt:
        with self.watchdog.waiting():
            attempt = self.engine.attempt(ok, self.epoch, votes).result()
        before = self.leader
        self.epoch, self.alive = attempt.epoch, attempt.alive
        if self.leader != before:
            if self.is_leader:
                self.at("takeover")
            self.observer.leader_changed(self.leader, self.current_iteration)
        return attempt

    def which_replicas(self, said: bool) -> tuple[int, ...]:
        """Living replicas of which some rank says yes. Collective over all living ranks."""
        found: set[int] = set()
        for first in range(0, self.layout.num_replicas, _REPLICAS_PER_VOTE):
            place = self.replica - first
            mine = said and 0 <= place < _REPLICAS_PER_VOTE
            attempt = self._attempt(True, 1 << place if mine else 0)
            found |= {first + bit for bit in range(_REPLICAS_PER_VOTE) if attempt.votes >> bit & 1}
        return tuple(replica for replica in self.alive if replica in found)

    def by_leader(self, work: Callable[[], None], *, check: bool = True) -> None:
        """Runs ``work`` on all ranks of the leader; when the leader is lost in it, on the next one.

        All other ranks wait. Nothing is returned: what the leader computed may be lost with it.
        """
        while True:
            leader = self.leader
            if self.is_leader:
                work()
            self.agree(check=check)
            if leader in self.alive:
                return

    def iteration(
        self, number: int, num_microbatches: int, buckets: Sequence[Bucket] = (), *, phase: str = "train"
    ) -> Iteration:
        """Begins an iteration. Collective: every living rank begins the same ones.

        Args:
            number: from 1, for messages and failure injection.
            num_microbatches: G, the microbatches of all replicas together.
            buckets: tensors to be summed over replicas, the same on every rank of a coordinate, in the
                order in which backward finishes them. They have to be zero (or empty of gradients) now.
            phase: "train" or "eval".

        Raises:
            StoppedBySignal, TooFewReplicas: on all living ranks together, when replicas were asked to leave.
        """
        if not self._is_training:
            self._is_training = True
            self._leave_on_sigterm()
            self.watchdog.train()
        self.watchdog.progress()
        if self._all_stop:
            raise StoppedBySignal(f"the job was asked to stop, the last iteration is {self.current_iteration}")
        if self._somebody_leaves:
            self._let_leave()
        self.current_iteration = number
        return Iteration(self, number, num_microbatches, buckets, phase)

    def ask_to_leave(self) -> None:
        """This rank's replica leaves, in good order, before the next iteration. What SIGTERM does during training.

        When the launcher sends it, it is the whole job that stops, on all hosts.
        """
        folder = os.environ.get("MEGATRON_RECOVER_JOB_DIR")
        if folder and os.path.exists(os.path.join(folder, STOP_FILE)):
            self._asked_to_stop = True
        else:
            self._asked_to_leave = True

    def drop_odd(self, odd: tuple[int, ...]) -> None:
        """These replicas have another state than the majority: they leave, the others go on."""
        reason = "its state (gradient norm, parameters) is another than that of the majority of replicas"
        self.observer.leaving(odd, reason)
        if self.replica in odd:
            leave_as_failed(f"replica {self.replica} is dropped: {reason}")

    def drop(self, replicas: tuple[int, ...], reason: str) -> None:
        """All living ranks know that these replicas leave: they do, the others wait until they are gone.

        Raises:
            TooFewReplicas: on all that are left together.
        """
        self.observer.leaving(replicas, reason)
        if self.replica in replicas:
            leave_as_failed(f"replica {self.replica} is dropped: {reason}")
        self.agree()

    def say_last_words(self, text: str) -> None:
        """A line from this rank, whoever leads."""
        os.write(2, f"megatron_recover: {text}\n".encode())

    def close(self) -> None:
        """Waits for all living ranks, then stops looking for failures. After it, leave with os._exit(0)."""
        # Some learn a moment earlier than others that all have come, and leave: that is no failure.
        self._closing = True
        self.engine.closing()
        self.agree(check=False)
        self.engine.close()
        self.watchdog.finish()
        Session._current = None

    def _let_leave(self) -> None:
        """Replicas that were asked to leave do so here, between two iterations."""
        self._somebody_leaves = False
        leaving = self.which_replicas(self._asked_to_leave)
        if not leaving:
            return  # lost meanwhile
        left = len(self.alive) - len(leaving)
        if left == 0:
            raise StoppedBySignal(f"every replica was sent SIGTERM, the last iteration is {self.current_iteration}")
        self._check_enough(left, f" if replica {', '.join(map(str, leaving))}, which was sent SIGTERM, leaves")
        self.observer.leaving(leaving, "it was sent SIGTERM")
        if self.replica in leaving:
            leave_in_order()
        self.agree()  # completes when they are gone

    def _check_enough(self, left: int, why: str = "") -> None:
        if left < self.min_replicas:
            raise TooFewReplicas(
                f"{left} of {self.layout.num_replicas} replicas are left{why}, fewer than "
                f"--recover-min-replicas {self.min_replicas}"
            )

    def _leave_on_sigterm(self) -> None:
        """Unless the script has other plans for SIGTERM (as Megatron with --exit-signal-handler)."""

        rank = os.getpid()

        def handle(signum: int, frame: FrameType | None) -> None:
            if os.getpid() == rank:
                self.ask_to_leave()
            else:  # a process that was forked from this one
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)

        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, handle)

    def _repaired(self, report: Repair) -> None:
        if self._closing:
            return
        if not self.is_ending and self.rank == self.layout.ranks_of(report.alive[0])[0]:
            withdraw_status()
        self.observer.repaired(report)

    def _orphaned(self) -> None:
        if self._closing:
            os._exit(0)
        self._leave_as_orphan()

    def _give_up(self, reason: str) -> None:
        comms = self.engine.comms
        # The world may be one from the middle of a repair, in which the dead are not known to be dead but not there.
        dead = membership.failed(comms.start, comms.start)
        present = [rank for rank in membership.members(comms.world, comms.start) if rank not in dead]
        left = set(self.layout.whole_replicas(present)) & set(self.engine.alive)
        give_up(reason, replicas_left=len(left), replica_size=self.layout.replica_size)
