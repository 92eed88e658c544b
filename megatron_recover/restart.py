"""When a job is started again from its last checkpoint, and with what.

This is the last resort, for what cannot be survived inside an iteration: a repair that does not end, a start that a
lost rank takes with it, the loss of a host under mpirun. Nothing here starts anything; ``launch`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_recover.errors import ExitCode
from megatron_recover.preflight import ScriptArguments, is_recovering_megatron, replica_size
from megatron_recover.supervise import Outcome

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file in --save that names the last complete checkpoint."""
RESTARTABLE = (ExitCode.NO_REPLICA_LEFT, ExitCode.GAVE_UP)

_FIRST_LOAD_FLAGS = ("--finetune", "--no-load-optim", "--no-load-rng", "--load-main-params-from-ckpt")
_FIRST_LOAD_VALUES = ("--ckpt-step", "--override-ckpt-iteration")
"""Flags about the checkpoint that the first start loads. For one of this job's own they are wrong: they would leave
out the optimizer, begin to count at 0, or take an older checkpoint."""
_NO_RESUME = {
    "--no-save-optim": "its checkpoints have no optimizer state to resume from",
    "--moe-use-upcycling": "its checkpoints are of the upcycled model and must be loaded without this flag",
    "--yaml-cfg": "where it saves stands in that file, which the launcher does not read",
    "--ckpt-convert-format": "it converts a checkpoint and trains nothing",
}
"""Flags with which a start from the job's own checkpoint would go wrong -> why."""


@dataclass(frozen=True)
class Place:
    """How far a try came."""

    iteration: int
    """The later of the last checkpoint and the last iteration that a rank was seen in."""
    is_start: bool = False
    """It did not get through the start: says nothing about the training."""

    def __str__(self) -> str:
        if self.is_start:
            return "at the start"
        return f"in iteration {self.iteration}" if self.iteration else "before the first iteration"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints that a job writes, as seen from the launcher. Make it before the first start.

    What lies in --save from before must not be taken for this job's: a new run may write over an old one's folder.
    """

    folder: Path | None
    """None: nothing is saved, or where it is saved cannot be looked into."""
    before: tuple[int, str] | None
    """Time and content of the tracker before the first start."""

    @classmethod
    def of(cls, script: str, words: Sequence[str]) -> Checkpoints:
        arguments = ScriptArguments(words)
        saves = arguments.values("--save") if is_recovering_megatron(script, arguments) else []
        if not saves or "://" in saves[-1]:
            return cls(None, None)
        return cls(Path(saves[-1]), _tracker(Path(saves[-1])))

    @property
    def last(self) -> int | None:
        """Iteration of the last checkpoint that this job has written; None before the first."""
        now = None if self.folder is None else _tracker(self.folder)
        if now is None or now == self.before:
            return None
        return int(now[1]) if now[1].isdigit() else None


def _tracker(folder: Path) -> tuple[int, str] | None:
    path = folder / TRACKER
    try:
        return path.stat().st_mtime_ns, path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def place_of(outcome: Outcome, checkpoint: int | None) -> Place:
    """How far a try came that ended like this."""
    iteration = max([checkpoint or 0, *(place.iteration for place in outcome.last_places)])
    return Place(iteration, outcome.was_starting or outcome.failed_start is not None)


def lacks_progress(places: Sequence[Place]) -> str | None:
    """Why the last of these tries shows that a further one would run in circles; None when it does not.

    A try that got through the start is compared with the last one before it that did. Two failed starts in a row are
    enough too.
    """
    if len(places) < 2:
        return None
    *before, last = places
    if last.is_start:
        return "the try before it did not get through the start either" if before[-1].is_start else None
    trained = [place for place in before if not place.is_start]
    if not trained or last.iteration > trained[-1].iteration:
        return None
    return f"it came no further than the try before (ended {last}, the one before {trained[-1]})"


def refusal(script: str, words: Sequence[str]) -> str | None:
    """Why a start from the last checkpoint would go wrong with these arguments; None when it would not."""
    arguments = ScriptArguments(words)
    if not is_recovering_megatron(script, arguments):
        return None
    for flag, why in _NO_RESUME.items():
        if arguments.has(flag):
            return f"with {flag} {why}"
    saves, loads = arguments.values("--save"), arguments.values("--load")
    if saves and "://" in saves[-1] and saves[-1:] != loads[-1:]:
        return f"what --save {saves[-1]} holds cannot be seen by the launcher (give --load with the same path)"
    return None


def arguments_of_next_try(
    script: str, words: Sequence[str], folder: Path | None, last: int | None
) -> tuple[tuple[str, ...], str]:
    """The arguments of the script in the next try, and in words where it goes on.

    Args:
        script: path of the training script.
        words: its arguments at the first start.
        folder: where it saves.
        last: iteration of the last checkpoint that this job has written there, if any.
    """
    arguments = ScriptArguments(words)
    if not is_recovering_megatron(script, arguments):
        return tuple(words), "with the same arguments"
    if folder is not None and last is not None:
        return resumed(words, folder), f"from the checkpoint of iteration {last} in {folder}"
    loads, saves = arguments.values("--load"), arguments.values("--save")
    if loads:
        return tuple(words), f"from --load {loads[-1]}"
    why = "no checkpoint has been written" if saves else "--save is not set"
    return tuple(words), f"from the beginning ({why})"


def resumed(words: Sequence[str], folder: Path) -> tuple[str, ...]:
    """The arguments of a Megatron script, to go on from the checkpoint in ``folder``."""
    kept: list[str] = []
    skip_values = False
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--"):
            skip_values = flag in _FIRST_LOAD_VALUES
        if not skip_values and flag not in _FIRST_LOAD_FLAGS:
            kept.append(word)
    return (*kept, "--load", str(folder))  # of several the last one counts


def ranks_of_next_try(num_ranks: int, size: int, least: int, replicas_left: int | None, places: int) -> int:
    """Ranks to start with: whole replicas, as many as were left and as there is room for.

    Args:
        num_ranks: of the try that ended.
        size: ranks of a replica.
        least: --recover-min-replicas.
        replicas_left: whole replicas that lived when the try ended; None or 0: not known, or none (then the
            processes are gone, and their places can be used again).
        places: ranks for which there is room.

    Returns:
        0 when it would be fewer than ``least`` replicas.
    """
    replicas = min(num_ranks, places) // size
    if replicas_left:
        replicas = min(replicas, replicas_left)
    return replicas * size if replicas >= max(least, 1) else 0


def sizes(script: str, words: Sequence[str]) -> tuple[int, int]:
    """Ranks of a replica, and the least number of replicas; 1 and 1 for programs whose flags are their own."""
    arguments = ScriptArguments(words)
    if not is_recovering_megatron(script, arguments):
        return 1, 1
    return replica_size(arguments), arguments.integer("--recover-min-replicas", default=1) or 1
