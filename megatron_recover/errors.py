"""Errors that a user meets, and the exit codes of a job.

Every way a job can end has a named exit code, so that a batch script can tell "run again" from "stop".
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Exit codes of ``megatron-recover launch`` and of the ranks of a job (16 and 17 are Megatron's own)."""

    DONE = 0
    """Training reached its end, or was ended by a signal or time limit after a checkpoint."""
    CRASHED = 1
    """The training script failed on every replica (its own error: see the log)."""
    BAD_CONFIGURATION = 2
    """Refused at start: a flag, a size, a path or the MPI library is not usable. Nothing was started."""
    TOO_FEW_REPLICAS = 70
    """Fewer than ``--recover-min-replicas`` replicas are left. A checkpoint was saved where ``--save`` is set
    and the disk took it; the message says so."""
    NO_REPLICA_LEFT = 71
    """No whole replica is left, so nothing could be saved. Resume from the last checkpoint."""
    REPLICAS_DIFFER = 72
    """Replicas that must be equal are not, or their plans do not match. Training stopped before the next step."""
    GAVE_UP = 73
    """A repair did not come to an end before its deadline, or a rank ended in a way that cannot be repaired."""
    NOT_SAVED = 74
    """Training came to its end, or was ended by a signal or time limit, but its last state could not be saved."""


class RecoverError(Exception):
    """Base of all errors of this package; ``exit_code`` is what the job ends with."""

    exit_code: ExitCode = ExitCode.CRASHED


class UserError(RecoverError):
    """Something the user can put right: one sentence that names the flag and the way round."""

    exit_code = ExitCode.BAD_CONFIGURATION


class TooFewReplicas(RecoverError):
    """Fewer living replicas than ``--recover-min-replicas``."""

    exit_code = ExitCode.TOO_FEW_REPLICAS


class ReplicasDiffer(RecoverError):
    """The run-time checks found replicas, plans or microbatch ids that do not match."""

    exit_code = ExitCode.REPLICAS_DIFFER


class NotSaved(RecoverError):
    """The last checkpoint could not be written."""

    exit_code = ExitCode.NOT_SAVED
