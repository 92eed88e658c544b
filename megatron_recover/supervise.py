"""Runs a job's mpirun and stays with it: output, signals, lost children, deadlines, and the clearing up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from megatron_recover.errors import ExitCode
from megatron_recover.guard import guarded
from megatron_recover.leaving import STOP_FILE
from megatron_recover.output import NoiseFilter, Pump
from megatron_recover.processes import JobProcesses
from megatron_recover.status import read_status
from megatron_recover.stop_signals import StopSignals
from megatron_recover.telemetry.blackbox import Snapshot, read_blackbox
from megatron_recover.vigil import Vigil

STATUS_FILE = "status.json"

_POLL_S = 0.1
_SCAN_S = 0.5
_EAGER_SCANS_S = 3.0  # at start every poll scans, so that ranks which fail at once are seen
STOP_GRACE_S = 30.0
"""After ``--timeout``: how long the ranks may take to leave before they are killed."""
_EMPTY_S = 10.0  # mpirun still there although no rank is
_GIVEN_UP_S = 3.0  # the job still there although a rank has given it up
_FROZEN_S = 3.0  # mpirun stopped for so long that it is no accident


@dataclass(frozen=True)
class Outcome:
    """How one start of a job ended, as seen from outside."""

    mpirun_code: int
    """Negative: the signal that ended it."""
    status: dict[str, Any] | None
    """What was last written into ``status.json``: ``exit_code``, ``reason`` and, where it is known,
    ``replicas_left``; None if nothing was. Ranks that fail while others go on write it too, the last leader writes
    it at the end."""
    num_ranks_seen: int
    """Ranks that ran on this host."""
    signal: signal.Signals | None
    """Signal with which the user or the scheduler asked the job to stop."""
    timed_out: bool
    last_places: list[Snapshot] = field(default_factory=list)
    """Black boxes of this host's ranks."""
    failed_start: str | None = None
    """Why the ranks cannot have come up together, when the job was ended for that."""
    was_starting: bool = False
    """No rank of this host was seen to be through the start."""
    is_managed: bool = False
    """The ranks ran under ``megatron_recover.run``: none ends the job without writing why."""
    has_heard: bool = False
    """A rank of another host has reported to the launcher."""


class Supervisor:
    """Runs one mpirun to its end. Use once, from the main thread.

    Args:
        command: the mpirun line.
        environment: of mpirun and, through it, of the ranks; holds the job's id.
        job_id: see ``processes.JobProcesses``.
        job_dir: where the ranks keep black boxes and the last leader writes ``status.json``.
        num_ranks: ranks the command starts.
        signals: with which the job is asked to stop.
        timeout_s: the job is stopped after this time; None: never.
        begun: when the time for ``timeout_s`` began (``time.monotonic()``); None: now.
        start_timeout_s: how long the start may stand still.
        logs: where stdout and stderr are also written, if anywhere.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        job_id: str,
        job_dir: Path,
        num_ranks: int,
        signals: StopSignals,
        timeout_s: float | None = None,
        begun: float | None = None,
        start_timeout_s: float = 300.0,
        logs: tuple[BinaryIO, BinaryIO] | None = None,
    ) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._job_dir = job_dir
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._begun = time.monotonic() if begun is None else begun
        self._logs = logs
        self._job_id = job_id
        self._processes = JobProcesses(job_id)
        self._vigil = Vigil(job_dir, num_ranks, start_timeout_s)
        self._noise = NoiseFilter()
        self._signals = signals
        self._stop_signal: signal.Signals | None = None
        self._is_stopping = False
        self._timed_out = False
        self._failed_start: str | None = None
        self._given_up_since: float | None = None
        self._frozen_since: float | None = None
        self._told: set[int] = set()  # ranks that were sent SIGTERM

    def run(self) -> Outcome:
        """Starts the job and waits for it. Nothing of it is left on this host afterwards."""
        with guarded(self._job_id, self._job_dir):
            # A session of its own: Ctrl-C in the terminal reaches the launcher only, which decides.
            mpirun = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            assert mpirun.stdout is not None
            assert mpirun.stderr is not None
            out_log, err_log = self._logs or (None, None)
            pumps = [Pump(mpirun.stdout, 1, out_log, None), Pump(mpirun.stderr, 2, err_log, self._noise)]
            for pump in pumps:
                pump.start()
            try:
                self._watch(mpirun)
            finally:
                self._processes.end_all()
                code = mpirun.wait()
                for pump in pumps:
                    pump.join(5.0)
                self._processes.remove_leftovers()
        self._vigil.conclude()
        places = (read_blackbox(self._job_dir, rank) for rank in range(self._num_ranks))
        return Outcome(
            mpirun_code=code,
            status=self._status(),
            num_ranks_seen=len(self._processes.ranks_seen),
            signal=self._stop_signal,
            timed_out=self._timed_out,
            last_places=[place for place in places if place is not None],
            failed_start=self._failed_start,
            was_starting=self._vigil.is_managed and self._vigil.is_starting,
            is_managed=self._vigil.is_managed,
            has_heard=self._noise.has_heard,
        )

    def _watch(self, mpirun: subprocess.Popen[bytes]) -> None:
        """Returns when mpirun has ended or must be ended."""
        begin = time.monotonic()
        next_scan = 0.0
        empty_since: float | None = None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                mpirun.wait(_POLL_S)
                return
            now = time.monotonic()
            if self._act_on_signals():
                return
            if self._timeout_s is not None and now - self._begun > self._timeout_s:
                if not self._timed_out:
                    _say(f"--timeout {self._timeout_s:g}: the job is stopped.")
                self._timed_out = self._is_stopping = True
                if now - self._begun > self._timeout_s + STOP_GRACE_S:
                    return
            if now < next_scan and not self._is_stopping:
                continue
            next_scan = now + (_SCAN_S if now - begin > _EAGER_SCANS_S else 0.0)
            self._processes.scan()
            self._processes.end_orphans()
            if self._is_stopping:
                self._stop(mpirun)
            self._failed_start = self._vigil.look(self._processes, now)
            if self._failed_start is not None:
                return
            if self._is_given_up(now):
                return
            self._look_at_mpirun(mpirun, now)
            # Last resort against an mpirun that does not end although its job has.
            ranks, seen = self._processes.ranks, self._processes.ranks_seen
            is_empty = not ranks and len(seen) == self._num_ranks  # and all of them were on this host
            empty_since = (empty_since or now) if is_empty else None
            if empty_since is not None and now - empty_since > _EMPTY_S:
                return

    def _is_given_up(self, now: float) -> bool:
        """Whether a rank has given up for all, and mpirun has had the time to end the others."""
        if self._given_up_since is None:
            status = self._status()
            if status is None or status["exit_code"] != ExitCode.GAVE_UP:
                return False
            self._given_up_since = now
        return now - self._given_up_since > _GIVEN_UP_S

    def _look_at_mpirun(self, mpirun: subprocess.Popen[bytes], now: float) -> None:
        """Says so, once, when mpirun alone is stopped. Nothing more: whoever stopped it may let it go on, and a
        suspended batch job is stopped as a whole, the launcher included."""
        with contextlib.suppress(psutil.Error):
            if psutil.Process(mpirun.pid).status() != psutil.STATUS_STOPPED:
                self._frozen_since = None
            elif self._frozen_since is None:
                self._frozen_since = now
            elif now > self._frozen_since + _FROZEN_S:
                self._frozen_since = float("inf")
                _say(
                    f"mpirun is stopped (SIGSTOP), so the output of the ranks stands still: `kill -CONT {mpirun.pid}` "
                    "lets it go on."
                )

    def _act_on_signals(self) -> bool:
        """True when the job must be ended at once."""
        while self._signals.pending:
            received = self._signals.pending.pop(0)
            if self._stop_signal is not None and received == signal.SIGINT:
                _say("the job is ended at once.")
                return True
            self._told.clear()  # a repeated SIGTERM is passed on again
            if self._stop_signal is None:
                hint = " (Ctrl-C again to end it at once)" if received == signal.SIGINT else ""
                _say(f"{received.name} received, the ranks are asked to stop{hint}.")
            self._stop_signal = self._stop_signal or received
            self._is_stopping = True
        return False

    def _stop(self, mpirun: subprocess.Popen[bytes]) -> None:
        """Asks each rank of this host once. Not through mpirun: on SIGTERM it kills them a second later.

        They agree with those of the other hosts: with Megatron's --exit-signal-handler, or because the stop file says
        that it is the whole job that is to stop.
        """
        with contextlib.suppress(OSError):
            (self._job_dir / STOP_FILE).touch()
        if not self._processes.ranks_seen:
            mpirun.terminate()  # nothing runs yet
            return
        with contextlib.suppress(psutil.Error):  # with mpirun stopped the ranks would wait for room in its pipes
            if psutil.Process(mpirun.pid).status() == psutil.STATUS_STOPPED:
                os.kill(mpirun.pid, signal.SIGCONT)
        self._told |= self._processes.signal_ranks(signal.SIGTERM, except_pids=self._told)

    def _status(self) -> dict[str, Any] | None:
        """What was said last about the end of the job, on this host or another one."""
        said = [self._noise.status] if self._noise.status is not None else []
        with contextlib.suppress(OSError, UnicodeDecodeError):
            path = self._job_dir / STATUS_FILE
            said.append((path.stat().st_mtime, read_status(path.read_text())))
        # The last word counts, also when it is that nothing holds any more.
        return max(said, key=lambda one: one[0])[1] if said else None


def _say(text: str) -> None:
    print(f"megatron-recover: {text}", file=sys.stderr, flush=True)
