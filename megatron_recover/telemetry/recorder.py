"""Turns what the session tells into events, log lines and numbers for metrics."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_recover.faults import PHASES, TRY_VARIABLE
from megatron_recover.telemetry import events
from megatron_recover.telemetry.blackbox import BlackBox, Snapshot, read_blackbox
from megatron_recover.telemetry.events import EventLog, read_events
from megatron_recover.telemetry.streams import say

if TYPE_CHECKING:
    from megatron_recover.collectives.layout import Layout
    from megatron_recover.collectives.repair import Repair
    from megatron_recover.session import Iteration


@dataclass
class Totals:
    """Running numbers of this rank, for metrics."""

    repairs: int = 0
    repair_ms: float = 0.0
    redone: int = 0


class Recorder:
    """An observer of a session. Every rank has one; only the leader's first rank writes and prints.

    All ranks see the same repairs and commits. So a new leader knows what the old one may have left unwritten,
    and writes it.

    Args:
        layout: who belongs to which replica, on which host.
        rank: this start rank.
        path: events.jsonl, or None.
        job_dir: directory of the black boxes.
    """

    def __init__(self, layout: Layout, rank: int, path: str | os.PathLike[str] | None, job_dir: str | None) -> None:
        self._layout = layout
        self._rank = rank
        self._path = path
        self._job_dir = job_dir
        self._log = EventLog(path)
        self.blackbox = BlackBox(job_dir, rank) if job_dir else None
        self._leader = 0
        self._iteration = 0
        self._epoch = 0
        self._repaired: list[tuple[int, Repair]] = []
        self._leaving: dict[int, str] = {}
        self.totals = Totals()
        self.on_leader_change: Callable[[], None] = lambda: None
        """Called on every rank, in the training thread, when another replica leads."""
        self.on_agreement: Callable[[], None] = lambda: None
        """Called on every rank, in the training thread, after each agreement."""

    @property
    def _writes(self) -> bool:
        return self._rank == self._layout.ranks_of(self._leader)[0]

    def started(self, policy: str, versions: dict[str, str]) -> None:
        """The job runs. Called once, on every rank."""
        if self._writes:
            layout = self._layout
            self._write(
                events.START,
                num_ranks=layout.num_ranks,
                replica_size=layout.replica_size,
                num_replicas=layout.num_replicas,
                policy=policy,
                number_of_try=int(os.environ.get(TRY_VARIABLE, "1")),
                versions=versions,
            )
            say(
                f"{layout.num_ranks} ranks in {layout.num_replicas} replicas of {layout.replica_size}, "
                f"policy {policy}"
            )

    def phase(self, phase: str, iteration: int, index: int) -> None:
        """Observer: a rank enters a phase."""
        self._iteration = iteration
        if self.blackbox is not None:
            self.blackbox.mark(phase, iteration, index)

    def repaired(self, report: Repair) -> None:
        """Observer: a repair is done (engine thread)."""
        led_before = self._leader
        self._leader = report.alive[0]
        self._epoch = report.epoch
        self._repaired.append((self._iteration, report))
        self.totals.repairs += 1
        self.totals.repair_ms += report.repair_s * 1e3
        if not self._writes:
            return
        if led_before != self._leader:
            for iteration, missed in self._unwritten(report.epoch):
                self._write_repair(iteration, missed)
        self._write_repair(self._iteration, report)
        if led_before != self._leader:
            self._write(events.TAKEOVER, leader=self._leader)

    def committed(self, iteration: Iteration) -> None:
        """Observer: an iteration is committed (training thread)."""
        self.totals.redone += iteration.redone
        if iteration.round.number > 1 and self._writes:
            alive = list(iteration.plan.alive)
            self._write(events.COMMIT, rounds=iteration.round.number, redone=iteration.redone, alive=alive)
            say(
                f"iteration {iteration.number}{' (evaluation)' if iteration.phase == 'eval' else ''} complete after "
                f"{iteration.round.number} rounds: {iteration.redone} of {iteration.num_microbatches} microbatches "
                f"redone by the {_count(len(alive), 'replica')} left"
            )

    def leaving(self, replicas: tuple[int, ...], reason: str) -> None:
        """Observer: these replicas are about to leave; that they are gone then is no failure."""
        self._leaving.update(dict.fromkeys(replicas, reason))
        if self._writes:
            self._write(events.LEAVE, replicas=list(replicas), reason=reason)
            say(f"iteration {self._iteration}: replica {_list(replicas)} leaves: {reason}")

    def leader_changed(self, leader: int, iteration: int) -> None:
        """Observer: all ranks know a new leader."""
        self.on_leader_change()
        if self._writes:
            say(f"replica {leader} leads from here on: it prints and saves")

    def agreed(self) -> None:
        """Observer: all ranks have come to an agreement."""
        self.on_agreement()

    def finished(self, exit_code: int, reason: str) -> None:
        """The job ends."""
        if self._writes:
            self._write(events.FINISH, exit_code=exit_code, reason=reason)

    def _write(self, event: str, **fields: Any) -> None:
        self._log.write(event, iteration=self._iteration, epoch=self._epoch, **fields)

    def _unwritten(self, epoch: int) -> list[tuple[int, Repair]]:
        if self._path is None:
            return []
        try:
            before = read_events(self._path)
        except OSError:
            before = []
        written: set[int] = set()
        for event in before:
            if event["event"] == events.START:  # of an earlier job, whose epochs are others
                written.clear()
            elif event["event"] == events.REPAIR:
                written.add(event["epoch"])
        return [(at, one) for at, one in self._repaired if one.epoch < epoch and one.epoch not in written]

    def _write_repair(self, iteration: int, report: Repair) -> None:
        if all(replica in self._leaving for replica in report.replicas_lost):
            self._write_repair_alone(iteration, report)
            say(
                f"replica {_list(report.replicas_lost)} has left, repaired in {report.repair_s * 1e3:.0f} ms; "
                f"{len(report.alive)} of {_count(self._layout.num_replicas, 'replica')} left (epoch {report.epoch})"
            )
            return
        boxes = [box for rank in report.ranks_lost if (box := self._read(rank)) is not None]
        dead = [box for box in boxes if box.died_at > 0] or boxes[:1]
        ranks = [box.rank for box in dead] or list(report.ranks_lost)
        first = dead[0] if dead else None
        detect_ms = (report.noticed_at - first.died_at) * 1e3 if first and first.died_at > 0 else None
        hosts = sorted({self._layout.places[rank].host for rank in report.ranks_lost})
        self._log.write(
            events.FAILURE,
            iteration=iteration,
            epoch=report.epoch - 1,
            ranks=ranks,
            replicas=list(report.replicas_lost),
            hosts=hosts,
            phase=first.phase if first else None,
            index=first.index if first and first.index >= 0 else None,
            detect_ms=detect_ms,
            time=report.noticed_at,
        )
        self._write_repair_alone(iteration, report)
        where = _where(first)
        say(
            f"iteration {iteration}: lost rank {_list(ranks)} on {_list(hosts)}{where}, and with it replica "
            f"{_list(report.replicas_lost)}; "
            + (f"noticed after {detect_ms:.0f} ms, " if detect_ms is not None else "")
            + f"repaired in {report.repair_s * 1e3:.0f} ms; {len(report.alive)} of "
            f"{_count(self._layout.num_replicas, 'replica')} left (epoch {report.epoch})"
        )

    def _write_repair_alone(self, iteration: int, report: Repair) -> None:
        self._log.write(
            events.REPAIR,
            iteration=iteration,
            epoch=report.epoch,
            ranks_lost=list(report.ranks_lost),
            replicas_lost=list(report.replicas_lost),
            alive=list(report.alive),
            repair_ms=report.repair_s * 1e3,
            settle_ms=report.settle_s * 1e3,
        )

    def _read(self, rank: int) -> Snapshot | None:
        return read_blackbox(self._job_dir, rank) if self._job_dir else None


def _list(values: Any) -> str:
    return ", ".join(str(value) for value in values)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


def _where(box: Snapshot | None) -> str:
    if box is None or not box.phase:
        return ""
    unit = PHASES.get(box.phase)
    return f" in {box.phase}" + (f" of {unit} {box.index}" if unit and box.index >= 0 else "")
