"""How a process leaves a job.

Only two ways do not disturb the others: SIGKILL to itself and ``os._exit(0)``. A normal interpreter exit or
MPI_Finalize of one rank hangs the rest, a non-zero exit code ends the whole job (measured) unless the rank's keeper
turns it into a death. Children (checkpoint and data workers) would keep mpirun's pipes open, so they are ended first.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import traceback
import zlib
from pathlib import Path

import psutil

from megatron_recover.errors import ExitCode
from megatron_recover.lease import Stage, own_lease
from megatron_recover.status import WITHDRAWN, tell_launcher

_has_told = False  # this process has written down how the job ends

STOP_FILE = "stop"
"""In the job's directory: the launcher asks the job as a whole to stop, not a single replica to leave."""

ATEXIT_S = 20.0
"""Time for exit handlers (wandb uploads, writers) of a process that ends in good order."""


def end_children() -> None:
    """Kills every descendant of this process."""
    with contextlib.suppress(psutil.Error, OSError, MemoryError):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()


def leave_as_failed(reason: str, *, quiet: bool = False) -> None:
    """Leaves at once, as a failure that the others repair. Does not return."""
    if not quiet:
        with contextlib.suppress(Exception):
            whose = f"rank {own_lease().rank} (process {os.getpid()})"
            print(f"megatron_recover: {whose} leaves: {reason}", file=sys.__stderr__, flush=True)
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]
    end_children()
    if own_lease().read().stage is not Stage.STARTING:  # which tells the launcher that the start has failed
        own_lease().enter(Stage.ENDING)  # its keeper need not say anything
    os.kill(os.getpid(), signal.SIGKILL)


def leave_as_orphan() -> None:
    """Leaves because another member of this replica is dead (called on the engine thread). Does not return."""
    end_children()
    os._exit(0)


def leave_in_order() -> None:
    """Leaves because this replica was asked to, while the others go on. Does not return."""
    _run_exit_handlers()
    end_children()
    os._exit(0)


def give_up(reason: str, replicas_left: int | None = None, replica_size: int | None = None) -> None:
    """Ends the job because waiting has no sense any more. Does not return.

    The non-zero exit code takes the other ranks down, which is what is wanted here: the launcher starts the job again
    from the last checkpoint.

    Args:
        reason: for the log and the launcher.
        replicas_left: whole replicas that are alive, as far as is known here.
        replica_size: ranks of a replica.
    """
    with contextlib.suppress(Exception):
        print(f"megatron_recover: {reason}", file=sys.__stderr__, flush=True)
    write_status(ExitCode.GAVE_UP, reason, replicas_left=replicas_left, replica_size=replica_size)
    end_children()
    own_lease().ends_with(ExitCode.GAVE_UP)
    os._exit(ExitCode.GAVE_UP)


def end_together(code: int) -> None:
    """Ends a process after all living ranks have agreed to end. Does not return.

    Exit handlers run under a deadline; then ``os._exit``, because MPI must not be finalised rank by rank.
    """
    _run_exit_handlers()
    end_children()
    own_lease().ends_with(code)
    os._exit(code)


def _run_exit_handlers() -> None:
    runner = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    runner.start()
    runner.join(ATEXIT_S)
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]


def write_status(code: int, reason: str, job_dir: str | None = None, **known: int | None) -> None:
    """Tells the launcher how the job ended (``status.json`` in the job's directory). Never raises."""
    global _has_told
    _has_told = True
    folder = job_dir or os.environ.get("MEGATRON_RECOVER_JOB_DIR")
    if not folder:
        return
    status: dict[str, object] = {"exit_code": int(code), "reason": reason}
    status.update((name, value) for name, value in known.items() if value is not None)
    _write(folder, status)
    tell_launcher(status)


def _write(folder: str, status: dict[str, object]) -> None:
    with contextlib.suppress(OSError):
        target = Path(folder) / "status.json"
        draft = target.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(status))
        draft.replace(target)


def withdraw_status() -> None:
    """A rank that failed has said how the job ends, and it does not: the others go on. Never raises."""
    folder = os.environ.get("MEGATRON_RECOVER_JOB_DIR")
    if folder and not _has_told:
        _write(folder, WITHDRAWN)
        tell_launcher(WITHDRAWN)


def report_error(error: BaseException, rank: int) -> None:
    """Prints a traceback once per kind of error and host, however many ranks meet the same one."""
    kind, where = describe(error), _raised_at(error)
    folder = os.environ.get("MEGATRON_RECOVER_JOB_DIR")
    first = True
    if folder:
        marker = Path(folder) / f"error-{zlib.crc32((kind + where).encode()):x}"
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            first = False
        except OSError:
            pass
    if first:
        text = "".join(traceback.format_exception(error))
        print(f"megatron_recover: rank {rank} failed\n{text}", file=sys.__stderr__, flush=True)
    else:
        print(
            f"megatron_recover: rank {rank} failed with the same error ({kind})",
            file=sys.__stderr__,
            flush=True,
        )


def describe(error: BaseException) -> str:
    """An error in one line: what it says, or where it was raised if it says nothing (a bare assertion)."""
    text = str(error).strip() or _raised_at(error)
    return f"{type(error).__name__}: {text}".splitlines()[0][:300]


def _raised_at(error: BaseException) -> str:
    return "".join(f"{f.filename}:{f.lineno} {f.line}" for f in traceback.extract_tb(error.__traceback__)[-1:])


def code_of(error: BaseException) -> int:
    """Exit code of a job that an error ends on every rank."""
    code = getattr(error, "exit_code", None)
    return int(code) if code is not None else int(ExitCode.CRASHED)
