"""What can be told from the command line before anything is started. Each check is one function over it.

The ranks check again, with everything parsed; here a mistake costs a second and one sentence instead of a
job in the queue.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_recover.errors import UserError
from megatron_recover.faults import Fault, parse_faults

_DATA_FLAGS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
_TIMEOUT_FLAGS = (
    "--recover-heartbeat-timeout",
    "--recover-progress-timeout",
    "--recover-setup-timeout",
    "--recover-repair-timeout",
)
_SIZE_FLAGS = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--recover-shards",
)


@dataclass(frozen=True)
class ScriptArguments:
    """The words after the script's name, read as Megatron's parser reads them (the last value counts)."""

    words: Sequence[str]

    def has(self, flag: str) -> bool:
        """Whether the flag is given, with or without a value."""
        return any(word == flag or word.startswith(f"{flag}=") for word in self.words)

    def lists(self, flag: str) -> list[list[str]]:
        """Values of each time the flag is given: the words up to the next flag, or what follows ``=``."""
        found = []
        for position, word in enumerate(self.words):
            if word.startswith(f"{flag}="):
                found.append([word[len(flag) + 1 :]])
            elif word == flag:
                values = []
                for value in self.words[position + 1 :]:
                    if value.startswith("--"):
                        break
                    values.append(value)
                found.append(values)
        return found

    def values(self, flag: str) -> list[str]:
        """First value of each time the flag is given."""
        return [values[0] for values in self.lists(flag) if values]

    def integer(self, flag: str, default: int | None = None, least: int = 1) -> int | None:
        """Value of a flag that takes a whole number.

        Raises:
            UserError: it is no whole number, or below ``least``.
        """
        values = self.values(flag)
        if not values:
            return default
        try:
            number = int(values[-1])
        except ValueError:
            raise UserError(f"{flag} {values[-1]!r} is not a whole number: give one from {least}.") from None
        if number < least:
            raise UserError(f"{flag} {number} is too small: give a whole number from {least}.")
        return number


def check(script: str, words: Sequence[str], num_ranks: int) -> None:
    """All checks of a launch that need nothing but the command line and the files it names.

    Args:
        script: path of the training script.
        words: its arguments.
        num_ranks: ranks to start.

    Raises:
        UserError: the first thing that is wrong, in one sentence with the way round.
    """
    arguments = ScriptArguments(words)
    check_num_ranks(num_ranks)
    check_script(script)
    if not is_recovering_megatron(script, arguments):
        return  # some other program on the public core: its flags are its own
    check_recover_flag(script, arguments)
    check_policy(arguments)
    check_faults(arguments, num_ranks)
    check_replicas(arguments, num_ranks)
    check_batch(arguments)
    check_data(arguments)
    check_save(arguments)
    check_timeouts(arguments)


def check_num_ranks(num_ranks: int) -> None:
    if num_ranks < 1:
        raise UserError(f"-n {num_ranks} starts nothing: give the number of ranks, for example -n 4.")


def check_script(script: str) -> None:
    if not Path(script).is_file():
        raise UserError(f"there is no script {script!r}: put the path of the training script after `--`.")


def is_recovering_megatron(script: str, arguments: ScriptArguments) -> bool:
    """Whether these are Megatron's flags: by the script's name, or because one of ours is among them."""
    return "pretrain" in Path(script).name or any(word.startswith("--recover") for word in arguments.words)


def check_recover_flag(script: str, arguments: ScriptArguments) -> None:
    if not arguments.has("--recover"):
        raise UserError(
            f"--recover is missing from the arguments of {Path(script).name}: add it, or start the script "
            "with torchrun if it is to be plain Megatron, which one lost rank ends."
        )


def check_policy(arguments: ScriptArguments) -> None:
    from megatron_recover.workload import POLICIES

    for policy in arguments.values("--recover-policy"):
        if policy not in POLICIES:
            raise UserError(f"--recover-policy {policy!r} is unknown: choose one of {', '.join(POLICIES)}.")


def check_faults(arguments: ScriptArguments, num_ranks: int) -> tuple[Fault, ...]:
    """The parsed ``--recover-inject`` specifications."""
    return parse_faults(arguments.values("--recover-inject"), num_ranks)


def replica_size(arguments: ScriptArguments) -> int:
    """Ranks of a replica: tensor x pipeline x context parallel size x shards inside the replica."""
    return math.prod(arguments.integer(flag, default=1) or 1 for flag in _SIZE_FLAGS)


def check_replicas(arguments: ScriptArguments, num_ranks: int) -> None:
    """The ranks must be cut into whole replicas, and not into fewer than the job may go down to."""
    size = replica_size(arguments)
    if num_ranks % size:
        factors = " x ".join(
            f"{flag} {arguments.integer(flag, default=1)}" for flag in _SIZE_FLAGS if arguments.has(flag)
        )
        below, above = num_ranks // size * size, (num_ranks // size + 1) * size
        choice = f"-n {below} or -n {above}" if below else f"-n {above}"
        raise UserError(
            f"-n {num_ranks} is not a multiple of the replica size {size} ({factors}), so it cannot be cut "
            f"into whole replicas: use {choice}."
        )
    least = arguments.integer("--recover-min-replicas", default=1)
    assert least is not None
    if least > num_ranks // size:
        raise UserError(
            f"--recover-min-replicas {least} is more than the {num_ranks // size} replicas that "
            f"-n {num_ranks} starts: lower it or start more ranks."
        )


def check_batch(arguments: ScriptArguments) -> None:
    """The global batch must be a whole number of microbatches for each shard of a replica."""
    whole = arguments.integer("--global-batch-size")
    micro = arguments.integer("--micro-batch-size")
    if whole is None or micro is None:
        return  # Megatron's own defaults and messages
    shards = arguments.integer("--recover-shards", default=1) or 1
    unit = micro * shards
    if whole % unit:
        of = f"--micro-batch-size {micro}" + (f" x --recover-shards {shards}" if shards > 1 else "")
        below, above = whole // unit * unit, (whole // unit + 1) * unit
        raise UserError(
            f"--global-batch-size {whole} is not a multiple of {of}: "
            f"use {f'{below} or {above}' if below else above}."
        )


def check_data(arguments: ScriptArguments) -> None:
    """Each data prefix must have its .idx and .bin file. Weights of a blend and remote paths are skipped."""
    for flag in _DATA_FLAGS:
        for values in arguments.lists(flag):
            for value in values:
                if not _is_number(value) and "://" not in value:
                    _check_prefix(flag, value)


def check_save(arguments: ScriptArguments) -> None:
    """A checkpoint folder that cannot be made would be noticed at the first save, after hours of training."""
    for path in arguments.values("--save"):
        if "://" in path:
            continue
        there = next(one for one in (Path(path).absolute(), *Path(path).absolute().parents) if one.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "is not a folder" if not there.is_dir() else "is not writable"
            raise UserError(f"--save {path}: {there} {why}; give a folder that can be made and written.")
        try:  # permissions do not tell root, or a network file system, everything
            Path(path).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise UserError(
                f"--save {path} cannot be written ({error.strerror}): give a folder that can be made and written."
            ) from None


def check_timeouts(arguments: ScriptArguments) -> None:
    """Seconds are numbers; the ranks check how large they may be."""
    for flag in _TIMEOUT_FLAGS:
        for value in arguments.values(flag):
            if not _is_number(value):
                raise UserError(f"{flag} {value!r} is not a number: give seconds.")


def _check_prefix(flag: str, prefix: str) -> None:
    missing = [suffix for suffix in (".idx", ".bin") if not Path(prefix + suffix).is_file()]
    if not missing:
        return
    stem = prefix.removesuffix(".bin").removesuffix(".idx")
    if stem != prefix and Path(stem + ".idx").is_file():
        raise UserError(f"{flag} {prefix}: give the prefix without the file's ending, {flag} {stem}.")
    raise UserError(
        f"{flag} {prefix}: there is no file {prefix}{missing[0]}; give the prefix of an .idx/.bin pair, "
        "which `megatron-recover prepare-data` makes from text."
    )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
