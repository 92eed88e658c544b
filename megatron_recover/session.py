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

Nothing in here knows Megatron.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from megatron_recover.collectives import runtime
from megatron_recover.collectives.engine import Attempt, Engine
from megatron_recover.collectives.repair import Repair
from megatron_recover.collectives.runtime import Communicators
from megatron_recover.errors import RecoverError, ReplicasDiffer, TooFewReplicas
from megatron_recover.faults import Fault, FaultInjector
from megatron_recover.leaving import give_up, leave_as_orphan
from megatron_recover.recovery import Bucket, BucketLedger, Contribution, check_contributions
from megatron_recover.workload import Plan, Policy, get_policy

_DIFFER = "differ"


class Observer(Protocol):
    """Told what happens; must not block and must not raise."""

    def phase(self, phase: str, iteration: int, index: int) -> None:
        """This rank enters a phase (training thread; ``reduce`` from the engine thread)."""

    def repaired(self, report: Repair) -> None:
        """A repair is done (engine thread)."""

    def committed(self, iteration: Iteration) -> None:
        """An iteration is committed (training thread)."""

    def leader_changed(self, leader: int, iteration: int) -> None:
        """Another replica leads from here on (training thread of every rank)."""

    def agreed(self) -> None:
        """All living ranks have come to an agreement (training thread; after ``leader_changed``)."""

    def finished(self, exit_code: int, reason: str) -> None:
        """The job ends (training thread of the leader's first rank)."""


class Silent:
    """An observer that does nothing."""

    def phase(self, phase: str, iteration: int, index: int) -> None: ...
    def repaired(self, report: Repair) -> None: ...
    def committed(self, iteration: Iteration) -> None: ...
    def leader_changed(self, leader: int, iteration: int) -> None: ...
    def agreed(self) -> None: ...
    def finished(self, exit_code: int, reason: str) -> None: ...


@dataclass(frozen=True)
class Round:
    """One pass of forward and backward inside an iteration."""

    number: int
    """From 1; above 1 after a failure."""
    ids: tuple[int, ...]
    """Microbatches this replica has to run in it, in order. May be empty."""


class Session:
    """A rank's membership in a job that survives the loss of replicas.

    ``alive``, ``leader`` and ``decisions`` change only when every living rank has come to the same
    agreement, so all ranks read the same values at the same point of their program.

    Args:
        comms: from ``collectives.runtime.start``.
        policy: name of a workload policy.
        min_replicas: with fewer living replicas ``TooFewReplicas`` is raised on all ranks together.
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
        injector: FaultInjector | None = None,
        observer: Observer | None = None,
        on_orphaned: Callable[[], None] = leave_as_orphan,
    ) -> None:
        self.layout = comms.layout
        self.rank, self.replica, self.coordinate = comms.rank, comms.replica, comms.coordinate
        self.policy: Policy = get_policy(policy, num_replicas=self.layout.num_replicas)
        self.min_replicas = min_replicas
        self.observer: Observer = observer or Silent()
        self.current_iteration = 0
        self.decisions: dict[str, bool] = {}
        self.fingerprint: tuple[Any, ...] = ()
        """What must be the same on all ranks of this coordinate at the next commit."""
        self.buffers: dict[int, torch.Tensor] = {}
        """Result buffers of the last committed iteration, for the next one: not allocated in each."""
        self._voters: dict[str, Callable[[], bool]] = {}
        self._injector = injector or FaultInjector((), self.rank)
        self._closing = False
        self._leave_as_orphan = on_orphaned
        self.engine = Engine(comms, on_repair=self._repaired, on_orphaned=self._orphaned, on_give_up=give_up)
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
        self.observer.phase(phase, self.current_iteration, index)
        self._injector.at(phase, self.current_iteration, index)

    def inject(self, phase: str, iteration: int, index: int = 0) -> None:
        """Carries out an injected failure of work that may go on beside the iterations (any thread)."""
        self._injector.at(phase, iteration, index)

    @property
    def pending_faults(self) -> tuple[Fault, ...]:
        """Injected failures of this rank that have not happened."""
        return self._injector.pending

    def vote(self, name: str, voter: Callable[[], bool]) -> None:
        """From now on each agreement also ORs ``voter()`` over all ranks into ``decisions[name]``.

        Every rank has to register the same names in the same order.
        """
        self._voters[name] = voter
        self.decisions[name] = False

    def agree(self, ok: bool = True, *, differ: bool = False, check: bool = True) -> Attempt:
        """Waits until every living rank has come here; updates ``alive``, ``leader`` and ``decisions``.

        Args:
            ok: this rank's yes or no.
            differ: this rank found replicas that differ.
            check: raise when too few replicas are left.

        Raises:
            TooFewReplicas: on all ranks together.
            ReplicasDiffer: on all ranks together, when one found a difference.
        """
        ballot = [differ] + [bool(voter()) for voter in self._voters.values()]
        votes = sum(1 << bit for bit, said in enumerate(ballot) if said)
        attempt = self.engine.attempt(ok, self.epoch, votes).result()
        before = self.leader
        self.epoch, self.alive = attempt.epoch, attempt.alive
        for bit, name in enumerate(self._voters, start=1):
            self.decisions[name] = bool(attempt.votes >> bit & 1)
        if self.leader != before:
            self.observer.leader_changed(self.leader, self.current_iteration)
        self.observer.agreed()
        if check and attempt.votes & 1 and not differ:
            raise ReplicasDiffer("another rank found replicas that differ; its message is in the log")
        if check and len(self.alive) < self.min_replicas:
            raise TooFewReplicas(
                f"{len(self.alive)} of {self.layout.num_replicas} replicas are left, fewer than "
                f"--recover-min-replicas {self.min_replicas}"
            )
        return attempt

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
        """
        self.current_iteration = number
        return Iteration(self, number, num_microbatches, buckets, phase)

    def close(self) -> None:
        """Waits for all living ranks, then stops looking for failures. After it, leave with os._exit(0)."""
        # Some learn a moment earlier than others that all have come, and leave: that is no failure.
        self._closing = True
        self.engine.closing()
        self.agree(check=False)
        self.engine.close()
        Session._current = None

    def _repaired(self, report: Repair) -> None:
        if not self._closing:
            self.observer.repaired(report)

    def _orphaned(self) -> None:
        if self._closing:
            os._exit(0)
        self._leave_as_orphan()


class Iteration:
    """One iteration: rounds until the world agrees that each microbatch is in, exactly once."""

    def __init__(
        self, session: Session, number: int, num_microbatches: int, buckets: Sequence[Bucket], phase: str
    ) -> None:
        self.session = session
        self.number = number
        self.num_microbatches = num_microbatches
        self.phase = phase
        self.plan: Plan = session.policy.assign(num_microbatches, session.alive)
        self.round = Round(0, ())
        self.redone = 0
        """Microbatches of lost replicas that had to be run again, on all replicas together."""
        self.is_committed = False
        self.results: list[Any] = []
        """After the commit: what was recorded, in microbatch order (None where nothing was)."""
        self.sums: dict[str, float] = {}
        """After the commit: the named sums over all replicas."""
        self._ledger = BucketLedger(session.engine, buckets, self._before_reduce, session.buffers)
        self._ids: list[int] = []
        self._records: dict[int, Any] = {}
        self._sums: dict[str, float] = {}

    def record(self, microbatch: int, value: Any) -> None:
        """Keeps a (picklable, small) value of a microbatch; see ``results``."""
        self._records[microbatch] = value

    def add(self, name: str, value: float) -> None:
        """Adds to a named sum over all rounds and replicas; see ``sums``."""
        self._sums[name] = self._sums.get(name, 0) + value

    def bucket_ready(self, index: int) -> None:
        """The bucket's local gradient is final in this round: it may be reduced while backward goes on."""
        self._ledger.ready(index)

    @property
    def early_buckets(self) -> int:
        """Buckets that were handed over while their round still ran, so that their reduction overlaps with it."""
        return self._ledger.early

    def wait_for_bucket(self, index: int, timeout_s: float) -> bool:
        """Waits until a bucket that was handed over is reduced. False: its epoch is gone; another round follows.

        Raises:
            TimeoutError: not within ``timeout_s`` seconds.
        """
        return self._ledger.wait_for(index, timeout_s)

    def __iter__(self) -> Iterator[int]:
        """Microbatch ids to run; when it ends the iteration is committed."""
        for current in self.rounds():
            yield from current.ids

    def rounds(self) -> Iterator[Round]:
        """The rounds to run; when it ends the iteration is committed. Run each to its end.

        Raises:
            TooFewReplicas, ReplicasDiffer: on all living ranks together.
        """
        session = self.session
        todo = tuple(self.plan.ids_of(session.replica))
        while True:
            epoch = session.epoch
            self.round = Round(self.round.number + 1, todo)
            self._ledger.open_round(epoch)
            yield self.round
            self._ids.extend(todo)
            ok, problem = self._reduce(epoch)
            session.at("commit")
            attempt = session.agree(ok, differ=problem is not None)
            if problem is not None:
                raise problem
            if attempt.ok:
                break
            if attempt.alive == self.plan.alive:
                raise RecoverError("a living rank could not commit although no replica was lost")
            todo = self._take_over(attempt.alive)
        session.at("after-commit")
        self._ledger.commit()
        self.is_committed = True
        session.observer.committed(self)

    def _take_over(self, alive: tuple[int, ...]) -> tuple[int, ...]:
        lost = [replica for replica in self.plan.alive if replica not in alive]
        self.redone += sum(len(self.plan.ids_of(replica)) for replica in lost)
        self.plan = self.session.policy.reassign(self.plan, alive)
        mine = tuple(self.plan.ids_of(self.session.replica))
        return mine[len(self._ids) :]

    def _before_reduce(self, index: int) -> None:
        self.session.at("reduce", index)

    def _reduce(self, epoch: int) -> tuple[bool, ReplicasDiffer | None]:
        """Buckets and contributions of the round. True: all of them are in, and they add up."""
        self._ledger.close_round()
        mine = Contribution(
            iteration=self.number,
            num_microbatches=self.num_microbatches,
            plan=self.plan.digest(),
            ids=self._ids,
            records=self._records,
            sums=self._sums,
            fingerprint=self.session.fingerprint,
        )
        gathered = self.session.engine.exchange(mine.pack(), epoch).result()
        if not self._ledger.wait() or gathered is None:
            return False, None
        parts = {replica: Contribution.unpack(data) for replica, data in gathered.items()}
        try:
            check_contributions(parts)
        except ReplicasDiffer as problem:
            return False, problem
        records: dict[int, Any] = {}
        sums: dict[str, float] = {}
        for part in parts.values():
            records.update(part.records)
            for name, value in part.sums.items():
                sums[name] = sums.get(name, 0) + value
        self.results = [records.get(microbatch) for microbatch in range(self.num_microbatches)]
        self.sums = sums
        return True, None
