"""Errors that a user meets, and the exit codes of a job.

Every way a job can end has a named exit code, so that a batch script can tell "run again" from "stop".
"""

from __future__ import annotations

import enum
import signal


class ExitCode(enum.IntEnum):
    """Exit codes of ``megatron-recover launch`` and of the ranks of a job, each with what it tells the user.

    The table in README.md and in ``launch --help`` is this one (a test compares them).
    """

    advice: str
    """What it means and what to do."""

    def __new__(cls, value: int, advice: str = "") -> ExitCode:
        member = int.__new__(cls, value)
        member._value_ = value
        member.advice = advice
        return member

    DONE = 0, "nothing to do. Also after a time limit that Megatron acted on"
    CRASHED = 1, "the training script failed: its error is in the log"
    BAD_CONFIGURATION = 2, "correct the flag, size, path or MPI that the message names; nothing was trained"
    TOO_FEW_REPLICAS = (
        70,
        "fewer than --recover-min-replicas are left: start again with --load on what is left (a checkpoint was "
        "saved if --save is set and the disk took it)",
    )
    NO_REPLICA_LEFT = 71, "every replica was lost, nothing could be saved: start again from the last checkpoint"
    REPLICAS_DIFFER = (
        72,
        "replicas that must be equal are not; nothing was saved: report it, go back to a checkpoint",
    )
    GAVE_UP = (
        73,
        "a repair or the start did not come to its end, or MPI or a host was lost, and the launcher could not or "
        "was not to start again: its last line says why; start again from the last checkpoint",
    )
    SAVED_ON_SIGNAL = 74, "ended by a signal after a checkpoint: submit again"
    NOT_FINITE = 75, "loss or gradient is NaN or Inf (rank, replica and microbatch are named in the log)"
    NOT_SAVED = (
        76,
        "training came to its end, but the disk did not take its last state: make room, start again from the last "
        "checkpoint",
    )

    @property
    def label(self) -> str:
        """The name in words."""
        return self.name.lower().replace("_", " ")


TIMED_OUT = 124
"""Exit code of a job that ``--timeout`` stopped, as of timeout(1)."""

EXIT_TABLE: tuple[tuple[str, str, str], ...] = (
    *((str(int(code)), code.label, code.advice) for code in ExitCode),
    (str(TIMED_OUT), "timed out", "--timeout stopped the job"),
    (
        "128+s",
        "stopped by a signal",
        "signal s ended the job before the ranks had come to an end; 143 also when they had, and --save is not set",
    ),
    ("others", "the script's own", "Megatron's 16 and 17 among them"),
)
"""Every exit code of ``megatron-recover launch``: code, name, meaning."""


def name_of(code: int) -> str:
    """Name of an exit code of a job."""
    if code == TIMED_OUT:
        return "timed out"
    try:
        return ExitCode(code).label
    except ValueError:
        return "stopped by a signal" if code > 128 else "the script's own"


class RecoverError(Exception):
    """Base of all errors of this package; ``exit_code`` is what the job ends with."""

    exit_code: int = ExitCode.CRASHED


class UserError(RecoverError):
    """Something the user can put right: one sentence that names the flag and the way round."""

    exit_code = ExitCode.BAD_CONFIGURATION


class TooFewReplicas(RecoverError):
    """Fewer living replicas than ``--recover-min-replicas``."""

    exit_code = ExitCode.TOO_FEW_REPLICAS


class ReplicasDiffer(RecoverError):
    """The run-time checks found replicas, plans or microbatch ids that do not match."""

    exit_code = ExitCode.REPLICAS_DIFFER


class StoppedBySignal(RecoverError):
    """Every replica was asked to leave (SIGTERM).

    Args:
        message: what happened.
        saved: a checkpoint was saved (exit code 74); otherwise it is 143, as of a process that SIGTERM ended.
    """

    def __init__(self, message: str, *, saved: bool = False) -> None:
        super().__init__(message)
        self.exit_code = ExitCode.SAVED_ON_SIGNAL if saved else 128 + signal.SIGTERM


class NotFinite(RecoverError):
    """A gradient is NaN or Inf, and is so again when it is computed again."""

    exit_code = ExitCode.NOT_FINITE


class NotSaved(RecoverError):
    """The last checkpoint could not be written."""

    exit_code = ExitCode.NOT_SAVED
