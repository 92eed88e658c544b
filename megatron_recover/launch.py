"""``megatron-recover launch``: from a command line to a finished job and its exit code."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from megatron_recover import hosts, mpi_install, preflight, restart
from megatron_recover.collectives.runtime_params import as_environment
from megatron_recover.errors import TIMED_OUT, ExitCode, UserError, name_of
from megatron_recover.faults import TRY_VARIABLE
from megatron_recover.processes import JOB_VARIABLE
from megatron_recover.status import LAUNCHER_HOST_VARIABLE
from megatron_recover.stop_signals import StopSignals
from megatron_recover.supervise import Outcome, Supervisor
from megatron_recover.telemetry.blackbox import Snapshot

JOB_DIR_VARIABLE = "MEGATRON_RECOVER_JOB_DIR"
ENTRY_MODULE = "megatron_recover.run"
MAX_RESTARTS = 3
START_TIMEOUT_S = 300.0
_RESOURCE_MANAGERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")

_OURS = frozenset(code for code in ExitCode if code >= ExitCode.TOO_FEW_REPLICAS)

Logs = tuple[BinaryIO, BinaryIO] | None
"""Where stdout and stderr are also written."""


@dataclass(frozen=True)
class Launch:
    """One job to start."""

    num_ranks: int
    script: str
    script_arguments: tuple[str, ...] = ()
    mpirun_options: tuple[str, ...] = ()
    """Passed to mpirun unchanged."""
    timeout_s: float | None = None
    log_dir: str | None = None
    max_restarts: int = MAX_RESTARTS
    """How often it may be started again from its last checkpoint."""
    start_timeout_s: float = START_TIMEOUT_S
    """A start that stands still for so long is taken for lost."""
    entry: str = ENTRY_MODULE
    """Module that each rank runs, with the script and its arguments."""


def launch(job: Launch) -> int:
    """Checks, starts and supervises a job. Returns its exit code (``errors.ExitCode`` and 124, 128+signal).

    Raises:
        UserError: something is wrong with the command line or the MPI; nothing was started.
    """
    preflight.check(job.script, job.script_arguments, job.num_ranks)
    if job.timeout_s is not None and not job.timeout_s > 0:  # NaN is not either
        raise UserError(
            f"--timeout {job.timeout_s:g} is no time: give the seconds after which the job is stopped."
        )
    if not job.start_timeout_s > 0:
        raise UserError(
            f"--start-timeout {job.start_timeout_s:g} is no time: give the seconds for which a start may stand still."
        )
    if job.max_restarts < 0:
        raise UserError(f"--max-restarts {job.max_restarts} is too small: give 0 to never start again, or more.")
    mpirun = mpi_install.find_mpirun()
    mpi_install.require_ulfm(mpi_install.inspect(mpirun))
    with ExitStack() as stack:
        logs = _open_logs(job.log_dir, stack)
        signals = stack.enter_context(StopSignals())
        code, reason = _Job(job, mpirun, logs, signals).run()
        reason = " ".join(reason.split())  # one line
        if code:
            _say(f"exit code {code} ({name_of(code)}): {reason}", logs)
    return code


def command(job: Launch, mpirun: Path) -> list[str]:
    """The mpirun line. What the user gave is not given twice: mpirun refuses that."""
    options = job.mpirun_options
    line = [str(mpirun)]
    if "--with-ft" not in options:
        line += ["--with-ft", "ulfm"]
    if os.geteuid() == 0 and "--allow-run-as-root" not in options:
        line += ["--allow-run-as-root"]
    # On a machine of one's own the number of cores is no limit to the number of ranks. Where hosts were
    # named or allocated their slots are, and mpirun says so itself.
    has_slots = any(option in hosts.HOST_OPTIONS for option in options) or any(
        v in os.environ for v in _RESOURCE_MANAGERS
    )
    if not has_slots and "--oversubscribe" not in options:
        line += ["--oversubscribe"]
    if "--bind-to" not in options:
        line += ["--bind-to", "none"]
    variables = (JOB_VARIABLE, JOB_DIR_VARIABLE, TRY_VARIABLE, LAUNCHER_HOST_VARIABLE)
    for name in (*variables, "PYTHONUNBUFFERED", "OMP_NUM_THREADS"):
        line += ["-x", name]  # to other hosts too
    line += [*options, "-n", str(job.num_ranks)]
    return [*line, sys.executable, "-m", job.entry, job.script, *job.script_arguments]


def environment(job_id: str, job_dir: Path, base: Mapping[str, str], number: int = 1) -> dict[str, str]:
    """Environment of mpirun and of all ranks, in the ``number``-th start of the job."""
    # Left over when a launcher is started by a rank of another job: it would pass for one of that job's.
    kept = {name: value for name, value in base.items() if not name.startswith(("OMPI_COMM_WORLD_", "PMIX_"))}
    kept.setdefault(
        "PYTHONUNBUFFERED", "1"
    )  # ranks write to a pipe, and output is to be seen when it is made
    kept.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: ranks share the cores of a host
    kept.setdefault("HOME", str(job_dir))  # mpirun does not start without one
    ours = {
        JOB_VARIABLE: job_id,
        JOB_DIR_VARIABLE: str(job_dir),
        TRY_VARIABLE: str(number),
        LAUNCHER_HOST_VARIABLE: socket.gethostname(),
    }
    return {**kept, **as_environment(), **ours}


def verdict(outcome: Outcome, timeout_s: float | None = None) -> tuple[int, str]:
    """Exit code of the job and the reason: what its last leader wrote or, without that, what can be seen."""
    stopped = outcome.timed_out or outcome.signal is not None
    # A rank that failed while others went on has written its error; if they were then stopped, that is why.
    crashed = outcome.status is not None and outcome.status["exit_code"] == ExitCode.CRASHED
    if outcome.failed_start is not None and crashed and not stopped:
        # One rank failed while the others were well: its host, perhaps. If it is the script, the next try says so.
        assert outcome.status is not None
        return ExitCode.GAVE_UP, f"the start failed: {outcome.failed_start} ({outcome.status['reason']})."
    if outcome.timed_out and outcome.status is not None and not crashed and outcome.status["exit_code"]:
        return TIMED_OUT, f"stopped after --timeout {timeout_s:g} seconds: {outcome.status['reason']}"
    if outcome.status is not None and not (stopped and crashed):
        return outcome.status["exit_code"], outcome.status["reason"]
    if outcome.timed_out:
        return TIMED_OUT, f"the job had not ended after --timeout {timeout_s:g} seconds and was stopped."
    if outcome.signal is not None:
        return 128 + outcome.signal, f"stopped by {outcome.signal.name} before the ranks had come to an end."
    if outcome.failed_start is not None:
        return ExitCode.GAVE_UP, f"the start failed: {outcome.failed_start}."
    if outcome.mpirun_code == 0:
        return (
            ExitCode.NO_REPLICA_LEFT,
            f"every rank was lost, nothing could be saved{_last_places(outcome.last_places)}.",
        )
    if outcome.num_ranks_seen == 0 and not outcome.has_heard:
        return (
            ExitCode.BAD_CONFIGURATION,
            f"mpirun did not start the ranks (its exit code is {outcome.mpirun_code}): its message is above, "
            "check the mpirun options in front of `--`.",
        )
    places = _last_places(outcome.last_places)
    if outcome.mpirun_code < 0:
        name = signal.Signals(-outcome.mpirun_code).name
        return ExitCode.GAVE_UP, f"mpirun was ended by {name}{places}."
    if outcome.mpirun_code in _OURS:
        # Its leader was on another host, so what it wrote is there.
        return ExitCode(outcome.mpirun_code), f"a rank ended the job{places}: its message is above."
    if outcome.is_managed:
        # A script that fails writes down why, whatever the rank. So it was MPI or its runtime.
        return (
            ExitCode.GAVE_UP,
            f"mpirun ended the job by itself (its exit code is {outcome.mpirun_code}){places}: a crash of MPI, or the "
            "loss of a host; its message is above.",
        )
    return (
        ExitCode.CRASHED,
        f"a rank ended the job (mpirun's exit code is {outcome.mpirun_code}){places}: its error is above.",
    )


class _Job:
    """All tries of a job."""

    def __init__(self, job: Launch, mpirun: Path, logs: Logs, signals: StopSignals) -> None:
        self._job = job
        self._mpirun = mpirun
        self._logs = logs
        self._signals = signals
        self._id = secrets.token_hex(8)  # the same in all tries: so they write to the same wandb run
        self._begun = time.monotonic()
        self._checkpoints = restart.Checkpoints.of(job.script, job.script_arguments)
        self._places: list[restart.Place] = []
        self._environment = environment(self._id, Path(tempfile.gettempdir()), os.environ)
        """For what is asked of mpirun between two tries."""

    def run(self) -> tuple[int, str]:
        """Exit code and reason of the last try."""
        attempt, number = self._job, 1
        while True:
            outcome = self._try(attempt, number)
            code, reason = verdict(outcome, attempt.timeout_s)
            lost: list[str] = []
            left: Sequence[hosts.Host] | None = None
            mpirun_failed = outcome.status is None and outcome.mpirun_code != 0
            if self._is_asked_to_stop(outcome) or not (mpirun_failed or code in restart.RESTARTABLE):
                return int(code), reason
            all_hosts = hosts.allocated(self._mpirun, attempt.mpirun_options, self._environment)
            if len(all_hosts) > 1:
                left = hosts.answering(self._mpirun, all_hosts, attempt.mpirun_options, self._environment)
                lost = [host.name for host in all_hosts if host not in left]
            if lost:
                reason = f"{_name_hosts(lost)} not answer{_last_places(outcome.last_places)}."
                if outcome.num_ranks_seen or outcome.has_heard:
                    code, reason = ExitCode.GAVE_UP, f"mpirun ended the job: {reason}"
            if code not in restart.RESTARTABLE:
                return int(code), reason
            ranks = attempt.num_ranks
            if left is not None and lost:
                ranks = hosts.ranks_for(ranks, all_hosts, left)
                attempt = replace(attempt, mpirun_options=hosts.options_for(left, attempt.mpirun_options))
            following = self._following(attempt, number, outcome, ranks, int(code), reason)
            if not isinstance(following, Launch):
                return following
            attempt, number = following, number + 1

    def _following(
        self, attempt: Launch, number: int, outcome: Outcome, places: int, code: int, reason: str
    ) -> Launch | tuple[int, str]:
        """What is started next, after saying so; or exit code and reason, when nothing is."""
        job = self._job
        last = self._checkpoints.last
        self._places.append(restart.place_of(outcome, last))

        def ended(why: str, code: int = code) -> tuple[int, str]:
            return code, f"{reason.rstrip('.')}; not started again: {why}."

        if number > job.max_restarts:
            return ended(f"--max-restarts is {job.max_restarts}") if job.max_restarts else (code, reason)
        if (why := restart.lacks_progress(self._places)) is not None:
            return ended(why)
        if (why := restart.refusal(job.script, job.script_arguments)) is not None:
            return ended(why)
        size, least = restart.sizes(job.script, job.script_arguments)
        status = outcome.status or {}
        replicas_left = status.get("replicas_left")
        size = status.get("replica_size", size)  # a program of one's own has said it
        ranks = restart.ranks_of_next_try(attempt.num_ranks, size, least, replicas_left, places)
        if not ranks:
            return ended(f"what is left is less than --recover-min-replicas {least}", ExitCode.TOO_FEW_REPLICAS)
        if self._is_asked_to_stop(outcome):
            return ended("the job was asked to stop")
        if job.timeout_s is not None and time.monotonic() - self._begun > job.timeout_s:
            return ended(f"--timeout {job.timeout_s:g}", TIMED_OUT)
        words, source = restart.arguments_of_next_try(job.script, job.script_arguments, self._checkpoints.folder, last)
        with_ranks = f"{ranks} ranks" if ranks == job.num_ranks else f"{ranks} of {job.num_ranks} ranks"
        reason = " ".join(reason.split())
        _say(
            f"try {number} ended with exit code {code} ({name_of(code)}): {reason.rstrip('.')}; "
            f"starting again (try {number + 1} of at most {job.max_restarts + 1}) with {with_ranks}, {source}",
            self._logs,
        )
        return replace(attempt, num_ranks=ranks, script_arguments=words)

    def _try(self, attempt: Launch, number: int) -> Outcome:
        job_dir = Path(tempfile.mkdtemp(prefix=f"megatron-recover-{self._id}-"))
        try:
            return Supervisor(
                command(attempt, self._mpirun),
                environment(self._id, job_dir, os.environ, number),
                job_id=self._id,
                job_dir=job_dir,
                num_ranks=attempt.num_ranks,
                signals=self._signals,
                timeout_s=attempt.timeout_s,
                begun=self._begun,
                start_timeout_s=attempt.start_timeout_s,
                logs=self._logs,
            ).run()
        finally:
            shutil.rmtree(job_dir, ignore_errors=True)

    def _is_asked_to_stop(self, outcome: Outcome) -> bool:
        return outcome.timed_out or outcome.signal is not None or bool(self._signals.pending)


def _open_logs(log_dir: str | None, stack: ExitStack) -> Logs:
    if log_dir is None:
        return None
    folder = Path(log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (
            stack.enter_context(open(folder / "stdout.log", "ab", buffering=0)),
            stack.enter_context(open(folder / "stderr.log", "ab", buffering=0)),
        )
    except OSError as error:
        raise UserError(
            f"--log-dir {log_dir} cannot be written ({error.strerror}): give another folder."
        ) from None


def _last_places(places: Sequence[Snapshot]) -> str:
    """Where the ranks were when they were last heard of, at most four of them."""
    known = [place for place in places if place.phase]
    if not known:
        return ""
    words = [f"rank {place.rank} iteration {place.iteration} {place.phase}" for place in known[:4]]
    more = f", and {len(known) - 4} more" if len(known) > 4 else ""
    return f" (last heard of: {', '.join(words)}{more})"


def _name_hosts(names: Sequence[str]) -> str:
    return f"host {names[0]} does" if len(names) == 1 else f"hosts {', '.join(names)} do"


def _say(text: str, logs: Logs) -> None:
    line = f"megatron-recover: {text}\n"
    sys.stderr.write(line)
    sys.stderr.flush()
    if logs is not None:
        logs[1].write(line.encode())
