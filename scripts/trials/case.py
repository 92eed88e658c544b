"""One job with failures, as text that repeats it: what is run, who is lost where, and how it ended.

    core layout=8x2 policy=balanced overlap=1 iterations=12 microbatches=9 kill:rank=3,iteration=5,phase=reduce

A case is all that a job is made from, so the same text starts the same job again (the moments at which the ranks
reach their places are the machine's own).
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_recover.errors import UserError
from megatron_recover.faults import PHASES, REPAIR_STEPS, SAVE_STEPS, Fault, parse_faults
from megatron_recover.workload import POLICIES

TRAINERS = ("core", "megatron")

MEGATRON_LAYOUTS = {
    "dp3": (3, 1, ""),
    "dp4": (4, 1, ""),
    "tp2dp3": (6, 2, "--tensor-model-parallel-size 2"),
    "pp2dp3": (6, 2, "--pipeline-model-parallel-size 2"),
    "tp2pp2dp2": (8, 4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}
"""Name -> (ranks, ranks of a replica, flags). Those of the core are RANKSxSIZE, as in 8x2."""

HARMLESS = ("pause",)
"""Kinds that lose no replica."""

STEPS = {"repair": REPAIR_STEPS, "save": SAVE_STEPS}
"""Phases that have steps -> their names."""

SURVIVED, RESTARTED, HUNG, WRONG = "survived", "restarted", "hung", "wrong"
VERDICTS = (SURVIVED, RESTARTED, HUNG, WRONG)


@dataclass(frozen=True)
class Case:
    """What one job is made from."""

    trainer: str
    layout: str
    policy: str = "balanced"
    overlap: bool = False
    iterations: int = 12
    microbatches: int = 8
    width: int = 48
    """Elements of the core trainer's model."""
    eval_every: int = 3
    save_every: int = 4
    faults: tuple[Fault, ...] = ()

    @property
    def num_ranks(self) -> int:
        return sizes(self.trainer, self.layout)[0]

    @property
    def replica_size(self) -> int:
        return sizes(self.trainer, self.layout)[1]

    @property
    def num_replicas(self) -> int:
        return self.num_ranks // self.replica_size

    def replica_of(self, rank: int) -> int:
        """On one host replicas are made of consecutive ranks."""
        return rank // self.replica_size

    def __str__(self) -> str:
        words = [self.trainer]
        for name in _FIELDS:
            value = getattr(self, name)
            words.append(f"{name}={int(value) if isinstance(value, bool) else value}")
        return " ".join(words + [fault.spec for fault in self.faults])

    @property
    def command(self) -> str:
        """The command line that repeats it."""
        return f"python scripts/chaos.py --repeat {shlex.quote(str(self))}"

    @property
    def deadline_s(self) -> float:
        """When it counts as hung: many times what it takes on a machine with a core for four ranks."""
        start = 120.0 + (5.0 if self.trainer == "core" else 20.0) * self.num_ranks
        # A minute or two until it is found, and a second start.
        slow = any(f.phase == "launch" or (f.kind, f.phase) in _FOUND_LATE for f in self.faults)
        return start + 12.0 * len(self.faults) + (start + 150.0 if slow else 0.0)


_FOUND_LATE = [("hang", phase) for phase in ("reduce", "repair", "init", "model", "datasets")]
_FIELDS = tuple(f.name for f in dataclasses.fields(Case) if f.name not in ("trainer", "faults"))


def sizes(trainer: str, layout: str) -> tuple[int, int]:
    """Ranks, and ranks of a replica.

    Raises:
        UserError: there is no such layout.
    """
    if trainer == "megatron":
        if layout not in MEGATRON_LAYOUTS:
            raise UserError(f"--layout {layout}: Megatron's are {', '.join(MEGATRON_LAYOUTS)}.")
        return MEGATRON_LAYOUTS[layout][:2]
    ranks, cross, size = layout.partition("x")
    if not (cross and ranks.isdigit() and size.isdigit() and int(size) > 0 and int(ranks) % int(size) == 0):
        raise UserError(f"--layout {layout}: the core's are RANKSxSIZE, for example 8x2: 4 replicas of 2 ranks.")
    if int(ranks) <= int(size):
        raise UserError(f"--layout {layout}: one replica alone survives nothing; give twice the ranks.")
    return int(ranks), int(size)


def parse_case(text: str) -> Case:
    """Reads what ``str(case)`` gave.

    Raises:
        UserError: says which word is wrong.
    """
    words = text.split()
    if not words or words[0] not in TRAINERS:
        raise UserError(f"--repeat {text!r}: the first word must be one of {', '.join(TRAINERS)}.")
    values: dict[str, int | str | bool] = {}
    specs = [word for word in words[1:] if ":" in word]
    for word in words[1:]:
        if ":" in word:
            continue
        name, _, value = word.partition("=")
        if name not in _FIELDS:
            raise UserError(f"--repeat: {word!r} is none of {', '.join(_FIELDS)}, and no fault (KIND:rank=...).")
        if name not in ("layout", "policy") and not value.isdigit():
            raise UserError(f"--repeat: {word!r} needs a number.")
        values[name] = value if name in ("layout", "policy") else bool(int(value)) if name == "overlap" else int(value)
    if "layout" not in values:
        raise UserError(f"--repeat {text!r}: layout=... is missing.")
    if values.get("policy", "balanced") not in POLICIES:
        raise UserError(f"--repeat: policy={values['policy']} is none of {', '.join(POLICIES)}.")
    num_ranks, _ = sizes(words[0], str(values["layout"]))
    faults = parse_faults(specs, num_ranks)
    return Case(trainer=words[0], faults=faults, **values)  # type: ignore[arg-type]  # read by name


@dataclass
class Result:
    """How a case ended."""

    case: Case
    number: int
    verdict: str
    reason: str = ""
    """Why it is hung or wrong."""
    seconds: float = 0.0
    exit_code: int = 0
    tries: int = 1
    fired: tuple[Fault, ...] = ()
    """Faults that really happened."""
    detect_ms: list[float] = field(default_factory=list)
    """From each first death of a repair to its notice."""
    repair_ms: list[float] = field(default_factory=list)
    largest_difference: float = 0.0
    """Largest relative difference of a loss to the failure-free run."""
    logs: str = ""

    @property
    def is_good(self) -> bool:
        return self.verdict in (SURVIVED, RESTARTED)

    @property
    def missed(self) -> tuple[Fault, ...]:
        """Faults whose place was not reached by their rank (lost before as an orphan, for instance)."""
        return tuple(fault for fault in self.case.faults if fault not in self.fired)

    def as_json(self) -> dict[str, object]:
        plain = dataclasses.asdict(self)
        plain |= {"case": str(self.case), "repeat": self.case.command}
        plain["fired"] = [fault.spec for fault in self.fired]
        plain["missed"] = [fault.spec for fault in self.missed]
        return plain


def lost_replicas(case: Case, fired: Iterable[Fault]) -> tuple[set[int], set[int]]:
    """Replicas that must be lost, and those that may be."""
    deadly = [fault for fault in fired if fault.kind not in HARMLESS]
    must = {case.replica_of(fault.rank) for fault in deadly if _is_sure(case, fault)}
    return must, {case.replica_of(fault.rank) for fault in deadly}


def _is_sure(case: Case, fault: Fault) -> bool:
    if fault.phase == "exit":
        return False  # all have agreed on the end: it has done its work
    # A replica that is asked to leave does so at the begin of an iteration, when all have heard of it.
    return fault.kind != "term" or 0 < fault.iteration <= case.iterations - 2


def moment(fault: Fault) -> str:
    """Row of a fault in the table; steps of a repair and of a save are moments of their own."""
    return f"{fault.phase}: {STEPS[fault.phase][fault.index]}" if fault.phase in STEPS else fault.phase


def moments() -> list[str]:
    """Rows of the table, in the order of a run."""
    return [one for phase in PHASES for one in ([f"{phase}: {n}" for n in STEPS[phase]] if phase in STEPS else [phase])]
