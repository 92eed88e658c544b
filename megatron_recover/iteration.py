"""One iteration of a session: rounds until the world agrees that each microbatch is in, exactly once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_recover.errors import NotFinite, RecoverError, ReplicasDiffer
from megatron_recover.recovery import Bucket, BucketLedger, Contribution, check_contributions, odd_replicas
from megatron_recover.workload import Plan

if TYPE_CHECKING:
    from megatron_recover.session import Session


@dataclass(frozen=True)
class Round:
    """One pass of forward and backward inside an iteration."""

    number: int
    """From 1; above 1 after a failure."""
    ids: tuple[int, ...]
    """Microbatches this replica has to run in it, in order. May be empty."""


class Iteration:
    """Made by ``Session.iteration``. Iterate over it, or over ``rounds()``."""

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
        self._ledger = BucketLedger(
            session.engine, buckets, self._before_reduce, session.buffers, check_finite=session.check_finite
        )
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
        with self.session.watchdog.waiting():
            return self._ledger.wait_for(index, timeout_s)

    def __iter__(self) -> Iterator[int]:
        """Microbatch ids to run; when it ends the iteration is committed."""
        for current in self.rounds():
            yield from current.ids

    def rounds(self) -> Iterator[Round]:
        """The rounds to run; when it ends the iteration is committed. Run each to its end.

        Raises:
            TooFewReplicas, ReplicasDiffer, NotFinite: on all living ranks together.
        """
        session = self.session
        todo = tuple(self.plan.ids_of(session.replica))
        while True:
            epoch = session.epoch
            self.round = Round(self.round.number + 1, todo)
            with session.watchdog.waiting():
                self._ledger.open_round(epoch)
            yield self.round
            self._ids.extend(todo)
            ok, problem = self._reduce(epoch)
            finite = not self._ledger.not_finite
            session.at("commit")
            attempt = session.agree(ok and finite, differ=problem is not None, not_finite=not finite)
            if problem is not None:
                raise problem
            if attempt.ok:
                break
            if attempt.alive == self.plan.alive:
                if not session.found_not_finite:
                    raise RecoverError("a living rank could not commit although no replica was lost")
                yield from self._look_for_not_finite(finite)
            todo = self._take_over(session.alive)
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
        session = self.session
        self._ledger.close_round()
        mine = Contribution(
            iteration=self.number,
            num_microbatches=self.num_microbatches,
            plan=self.plan.digest(),
            ids=self._ids,
            records=self._records,
            sums=self._sums,
            fingerprint=session.fingerprint,
        )
        with session.watchdog.waiting():
            gathered = session.engine.exchange(mine.pack(), epoch).result()
            if not self._ledger.wait() or gathered is None:
                return False, None
        parts = {replica: Contribution.unpack(data) for replica, data in gathered.items()}
        odd = odd_replicas(parts)
        if odd:
            session.drop_odd(odd)
            return False, None  # the agreement finds them gone, and another round makes up for them
        try:
            check_contributions(parts)
        except ReplicasDiffer as problem:
            return False, ReplicasDiffer(
                f"iteration {self.number}: {problem}; the optimizer has not stepped and nothing is saved: go back to "
                "the last checkpoint"
            )
        records: dict[int, Any] = {}
        sums: dict[str, float] = {}
        for part in parts.values():
            records.update(part.records)
            for name, value in part.sums.items():
                sums[name] = sums.get(name, 0) + value
        self.results = [records.get(microbatch) for microbatch in range(self.num_microbatches)]
        self.sums = sums
        return True, None

    def _look_for_not_finite(self, finite: bool) -> Iterator[Round]:
        """Some gradient is NaN or Inf: runs the microbatches of the replicas concerned again, one at a time.

        What is not finite again is the model's or the data's: all stop, and the log names it. What is finite the
        second time was the device's: its replica leaves, the others have their gradients still.

        Raises:
            NotFinite: on all living ranks together.
        """
        session = self.session
        suspects = session.which_replicas(not finite)
        culprits: list[int] = []
        if session.replica in suspects:
            where = self._ledger.not_finite[:3]
            for microbatch in list(self._ids):
                self._ledger.clear()
                yield Round(self.round.number, (microbatch,))
                names = self._ledger.not_finite_now()
                if names:
                    culprits.append(microbatch)
                    where = names[:3]
            if where:
                what = "finite in each microbatch when run again"
                if culprits:
                    what = f"microbatch {', '.join(map(str, culprits))}"
                session.say_last_words(
                    f"iteration {self.number}: the gradient of replica {session.replica}, rank {session.rank} is NaN "
                    f"or Inf ({', '.join(where)}): {what}"
                )
        # A microbatch that is named on one rank is named on the whole replica.
        repeated = session.which_replicas(bool(culprits))
        with session.watchdog.waiting():
            found = session.engine.exchange(pickle.dumps(culprits), session.epoch).result() or {}
        named = [f"replica {replica}, microbatch {n}" for replica, data in found.items() for n in pickle.loads(data)]
        glitched = tuple(replica for replica in suspects if replica in session.alive and replica not in repeated)
        # One replica that is right is needed to go on. (Some that were concerned may be lost by now.)
        if repeated or glitched == session.alive:
            raise NotFinite(
                f"iteration {self.number}: the gradient of {'; '.join(named) or 'a replica'} is NaN or Inf "
                "(see above); the optimizer has not stepped"
            )
        if glitched:
            session.drop(glitched, "its gradient was NaN or Inf, and finite when computed again: suspect its device")
