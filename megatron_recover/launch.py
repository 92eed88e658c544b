"""``megatron-recover launch``: from a command line to a finished job and its exit code."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatron_recover import mpi_install, preflight
from megatron_recover.collectives.runtime_params import as_environment
from megatron_recover.errors import ExitCode, UserError
from megatron_recover.processes import JOB_VARIABLE
from megatron_recover.supervise import Outcome, Supervisor
from megatron_recover.telemetry.blackbox import Snapshot

JOB_DIR_VARIABLE = "MEGATRON_RECOVER_JOB_DIR"
ENTRY_MODULE = "megatron_recover.run"
TIMED_OUT = 124
"""Exit code of a job that ``--timeout`` stopped, as of timeout(1)."""
_HOST_OPTIONS = ("--host", "-H", "--hostfile", "-hostfile", "--machinefile", "-machinefile")
_RESOURCE_MANAGERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


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
    entry: str = ENTRY_MODULE
    """Module that each rank runs, with the script and its arguments."""


def launch(job: Launch) -> int:
    """Checks, starts and supervises a job. Returns its exit code (``errors.ExitCode`` and 124, 128+signal).

    Raises:
        UserError: something is wrong with the command line or the MPI; nothing was started.
    """
    preflight.check(job.script, job.script_arguments, job.num_ranks)
    if job.timeout_s is not None and job.timeout_s <= 0:
        raise UserError(
            f"--timeout {job.timeout_s:g} is no time: give the seconds after which the job is stopped."
        )
    mpirun = mpi_install.find_mpirun()
    mpi_install.require_ulfm(mpi_install.inspect(mpirun))
    with ExitStack() as stack:
        logs = _open_logs(job.log_dir, stack)
        code, reason = _run(job, mpirun, logs)
        if code:
            line = f"megatron-recover: exit code {code} ({_name(code)}): {reason}\n"
            sys.stderr.write(line)
            sys.stderr.flush()
            if logs is not None:
                logs[1].write(line.encode())
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
    has_slots = any(option in _HOST_OPTIONS for option in options) or any(
        v in os.environ for v in _RESOURCE_MANAGERS
    )
    if not has_slots and "--oversubscribe" not in options:
        line += ["--oversubscribe"]
    if "--bind-to" not in options:
        line += ["--bind-to", "none"]
    for name in (JOB_VARIABLE, JOB_DIR_VARIABLE, "PYTHONUNBUFFERED", "OMP_NUM_THREADS"):
        line += ["-x", name]  # to other hosts too
    line += [*options, "-n", str(job.num_ranks)]
    return [*line, sys.executable, "-m", job.entry, job.script, *job.script_arguments]


def environment(job_id: str, job_dir: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Environment of mpirun and of all ranks."""
    # Left over when a launcher is started by a rank of another job: it would pass for one of that job's.
    kept = {name: value for name, value in base.items() if not name.startswith(("OMPI_COMM_WORLD_", "PMIX_"))}
    kept.setdefault(
        "PYTHONUNBUFFERED", "1"
    )  # ranks write to a pipe, and output is to be seen when it is made
    kept.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: ranks share the cores of a host
    kept.setdefault("HOME", str(job_dir))  # mpirun does not start without one
    return {**kept, **as_environment(), JOB_VARIABLE: job_id, JOB_DIR_VARIABLE: str(job_dir)}


def verdict(outcome: Outcome, timeout_s: float | None = None) -> tuple[int, str]:
    """Exit code of the job and the reason: what its last leader wrote or, without that, what can be seen."""
    stopped = outcome.timed_out or outcome.signal is not None
    # A rank that failed while others went on has written its error; if they were then stopped, that is why.
    if outcome.status is not None and not (stopped and outcome.status["exit_code"] == ExitCode.CRASHED):
        return outcome.status["exit_code"], outcome.status["reason"]
    if outcome.timed_out:
        return TIMED_OUT, f"the job had not ended after --timeout {timeout_s:g} seconds and was stopped."
    if outcome.signal is not None:
        return 128 + outcome.signal, f"stopped by {outcome.signal.name} before the ranks had come to an end."
    if outcome.mpirun_code == 0:
        return (
            ExitCode.NO_REPLICA_LEFT,
            f"every rank was lost, nothing could be saved{_last_places(outcome.last_places)}. "
            "Start the job again: it resumes from the last checkpoint (--load).",
        )
    if outcome.num_ranks_seen == 0:
        return (
            ExitCode.BAD_CONFIGURATION,
            f"mpirun did not start the ranks (its exit code is {outcome.mpirun_code}): its message is above, "
            "check the mpirun options in front of `--`.",
        )
    return (
        ExitCode.CRASHED,
        f"a rank ended the job (mpirun's exit code is {outcome.mpirun_code})"
        f"{_last_places(outcome.last_places)}: its error is above.",
    )


def _run(job: Launch, mpirun: Path, logs: tuple[BinaryIO, BinaryIO] | None) -> tuple[int, str]:
    job_id = secrets.token_hex(8)
    job_dir = Path(tempfile.mkdtemp(prefix=f"megatron-recover-{job_id}-"))
    try:
        outcome = Supervisor(
            command(job, mpirun),
            environment(job_id, job_dir, os.environ),
            job_id=job_id,
            job_dir=job_dir,
            num_ranks=job.num_ranks,
            timeout_s=job.timeout_s,
            logs=logs,
        ).run()
    finally:
        shutil.rmtree(job_dir, ignore_errors=True)
    code, reason = verdict(outcome, job.timeout_s)
    return int(code), reason


def _open_logs(log_dir: str | None, stack: ExitStack) -> tuple[BinaryIO, BinaryIO] | None:
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


def _name(code: int) -> str:
    if code == TIMED_OUT:
        return "timed out"
    try:
        return ExitCode(code).name.lower().replace("_", " ")
    except ValueError:
        return "stopped by a signal" if code > 128 else "the script's own"
