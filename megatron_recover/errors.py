"""Errors that a user meets, and the exit codes of a job.

Every way a job can end has a named exit code, so that a batch script can tell "run again" from "stop".
"""

from __future__ import annotations

import enum
import signal


class ExitCode(enum.IntEnum):
    """Exit codes of ``megatron-recover launch`` and of the ranks of a job (16 and 17 are Megatron's own)."""

    DONE = 0
    """Training reached its end, or was ended by a signal or time limit after a checkpoint."""
    CRASHED = 1
    """The training script failed on every replica (its own error: see the log)."""
    BAD_CONFIGURATION = 2
    """Refused at start: a flag, a size, a path or the MPI library is not usable. Nothing was started."""
    TOO_FEW_REPLICAS = 70
    """Fewer than ``--recover-min-replicas`` replicas are left. A checkpoint was saved where ``--save`` is set."""
    NO_REPLICA_LEFT = 71
    """No whole replica is left, so nothing could be saved. Resume from the last checkpoint."""
    REPLICAS_DIFFER = 72
    """Replicas that must be equal are not, or their plans do not match. Training stopped before the next step."""
    GAVE_UP = 73
    """A repair did not come to an end before its deadline, or a rank ended in a way that cannot be repaired."""
    SAVED_ON_SIGNAL = 74
    """Ended by a signal, after a checkpoint: submit again."""
    NOT_FINITE = 75
    """A gradient is NaN or Inf; the log names rank, replica and microbatch. Training stopped before the step."""


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
