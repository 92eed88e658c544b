"""Draws a job with failures at random. The same seed and number give the same case on every machine."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_recover.errors import UserError
from megatron_recover.faults import KINDS, PHASES, REPAIR_STEPS, SAVE_STEPS, Fault
from megatron_recover.workload import POLICIES
from trials.case import HARMLESS, Case, sizes

READY_KINDS, READY_PHASES = tuple(KINDS), tuple(PHASES)
"""What is drawn when nothing is asked for."""

CORE_LAYOUTS = {"4x1": 1, "8x1": 4, "12x1": 5, "16x1": 3, "8x2": 2, "12x2": 2, "9x3": 2, "12x3": 1, "8x4": 1}
MEGATRON_LAYOUTS = {"dp4": 3, "tp2dp3": 2, "pp2dp3": 2, "tp2pp2dp2": 1}
"""Layout -> how often it is drawn."""

BUCKETS = 3
"""Buckets of the core trainer's iteration."""

_START = ("launch", "init", "model", "datasets")
_LEASED = ("stop", "gil")
"""Kinds that only a lease finds. While model and data are set up it is minutes long, so they are not drawn there."""
_ONLY = {"nan": ("data", "forward", "backward"), "corrupt": ("after-commit", "optimizer")}
"""Kinds that can be told from a right computation only when they happen at these moments."""
_FOLLOWING = ("repair", "takeover")
"""Phases that only another failure leads to."""
_AT_LAUNCH = 0.06
_SAME_MOMENT = 0.3
_SAME_REPLICA = 0.15


@dataclass(frozen=True)
class Menu:
    """What may be drawn."""

    trainer: str = "core"
    layouts: tuple[str, ...] = ()
    """Empty: all of the trainer."""
    kinds: tuple[str, ...] = READY_KINDS
    phases: tuple[str, ...] = READY_PHASES

    def __post_init__(self) -> None:
        for flag, given, known in (("--kinds", self.kinds, KINDS), ("--phases", self.phases, PHASES)):
            for name in given:
                if name not in known:
                    raise UserError(f"{flag} {name}: there is no such one, choose from {', '.join(known)}.")
        for layout in self.layouts:
            sizes(self.trainer, layout)
        if not any(kinds_at(self, phase) for phase in self.phases):
            raise UserError(f"none of {', '.join(self.kinds)} can be tried in {', '.join(self.phases)}.")


def kinds_at(menu: Menu, phase: str) -> list[str]:
    """Kinds of the menu that can be survived in a phase."""
    kinds = [kind for kind in menu.kinds if phase in _ONLY.get(kind, PHASES)]
    if phase in _START and phase != "launch":
        kinds = [kind for kind in kinds if kind not in _LEASED]
    return kinds


def draw(menu: Menu, seed: int, number: int) -> Case:
    """The case with this number."""
    rng = random.Random(f"{seed}/{number}/{menu}")
    weights = CORE_LAYOUTS if menu.trainer == "core" else MEGATRON_LAYOUTS
    names = list(menu.layouts) or list(weights)
    layout = rng.choices(names, [weights.get(name, 1) for name in names])[0]
    if menu.trainer == "core":
        case = Case(
            "core",
            layout,
            policy=rng.choice(list(POLICIES)),
            overlap=rng.random() < 0.5,
            iterations=12,
            microbatches=rng.randint(4, 16),
            width=rng.choice((48, 4800, 96000)),
        )
    else:
        case = Case(
            "megatron",
            layout,
            policy=rng.choice(list(POLICIES)),
            overlap=rng.random() < 0.5,
            iterations=8,
            eval_every=4,
            save_every=4,
        )
    return _with_faults(case, menu, rng)


def _with_faults(case: Case, menu: Menu, rng: random.Random) -> Case:
    spare = case.num_replicas - 1  # one replica is always left
    count = max(rng.randint(1, spare) for _ in range(3))
    if case.trainer == "megatron":
        count = min(count, 4)
    places = sorted(_places(case, menu, rng, count), key=_order)
    alive, faults = list(range(case.num_replicas)), list[Fault]()
    for place in places:
        if place.kind == "corrupt" and not _is_found(case, place, places, alive):
            place = dataclasses.replace(place, kind="kill")
        harmless = place.kind in HARMLESS
        if not harmless and len(alive) == 1:
            continue
        replica = _victim(place, alive, rng)
        if not harmless:
            alive.remove(replica)
        fault = _at(case, place, replica, rng)
        if any(one.rank == fault.rank for one in faults):
            continue  # a rank has one fault
        faults.append(fault)
        if case.replica_size > 1 and not harmless and rng.random() < _SAME_REPLICA:
            other = fault.rank - 1 if fault.rank % case.replica_size else fault.rank + 1
            if not any(one.rank == other for one in faults) and place.phase not in ("data", "save"):
                faults.append(
                    Fault(rng.choice(_deadly(menu, place.phase)), other, fault.iteration, fault.phase, fault.index)
                )
    return dataclasses.replace(case, faults=tuple(faults))


@dataclass(frozen=True)
class _Place:
    """A fault before its rank is chosen."""

    kind: str
    iteration: int
    phase: str
    index: int = 0
    of_leader: bool = False
    """Whether the rank must belong to the replica that leads by then."""


def _places(case: Case, menu: Menu, rng: random.Random, count: int) -> list[_Place]:
    places: list[_Place] = []
    phases = [phase for phase in menu.phases if kinds_at(menu, phase)]
    if "launch" in phases and (phases == ["launch"] or rng.random() < _AT_LAUNCH):
        return [_Place(rng.choice(kinds_at(menu, "launch")), 0, "launch")]  # takes the start with it
    phases = [phase for phase in phases if phase != "launch"]
    ordinary = [phase for phase in phases if phase not in _FOLLOWING] or ["forward"]
    while len(places) < count:
        phase = rng.choice(phases)
        if phase in _FOLLOWING and (count - len(places) < 2 or any(one.phase in _FOLLOWING for one in places)):
            phase = rng.choice(ordinary)
        if phase in _FOLLOWING:
            places += _chain(case, menu, rng, phase)
        elif places and places[-1].phase not in _FOLLOWING and rng.random() < _SAME_MOMENT:
            places.append(dataclasses.replace(places[-1], kind=rng.choice(kinds_at(menu, places[-1].phase))))
        else:
            place = _Place(rng.choice(kinds_at(menu, phase)), *_moment(case, phase, rng))
            if place.kind == "corrupt":
                place = dataclasses.replace(place, iteration=rng.choice([1, 2, 5, 7, 10][: case.iterations // 2 - 1]))
            places.append(place)
    return places


def _chain(case: Case, menu: Menu, rng: random.Random, phase: str) -> list[_Place]:
    """A failure, and one in what it leads to."""
    before = [one for one in menu.phases if one not in (*_FOLLOWING, *_START, "exit")] or ["forward"]
    iteration, first, index = _moment(case, rng.choice(before), rng)
    step = rng.randrange(len(REPAIR_STEPS)) if phase == "repair" else 0
    return [
        _Place(rng.choice(_deadly(menu, first)), iteration, first, index, of_leader=phase == "takeover"),
        _Place(rng.choice(kinds_at(menu, phase)), iteration, phase, step),
    ]


def _moment(case: Case, phase: str, rng: random.Random) -> tuple[int, str, int]:
    share = max(1, case.microbatches // case.num_replicas)
    if phase in (*_START, "exit"):
        return (0 if phase in _START else case.iterations + 1), phase, 0
    if phase in ("eval", "save"):
        every = case.eval_every if phase == "eval" else case.save_every
        step = rng.randrange(len(SAVE_STEPS)) if phase == "save" else 0
        return every * rng.randint(1, case.iterations // every), phase, step
    iteration = rng.randint(1, case.iterations)
    if phase in ("data", "forward", "backward"):
        # Now and then one that this rank only has when it has taken over others.
        return iteration, phase, rng.randrange(share + (rng.random() < 0.2))
    if phase == "reduce" and (case.trainer == "core" or case.overlap):
        return iteration, phase, rng.randrange(BUCKETS if case.trainer == "core" else 2)
    return iteration, phase, 0


def _is_found(case: Case, place: _Place, places: Sequence[_Place], alive: Sequence[int]) -> bool:
    """Whether a majority of three or more is there to find a flipped bit in the next iteration, and nothing uses the
    wrong state before: no evaluation and no checkpoint."""
    at = place.iteration
    others = [one for one in places if one is not place and one.iteration in (at, at + 1)]
    is_used = at % case.eval_every == 0 or at % case.save_every == 0 or at >= case.iterations
    return len(alive) >= 3 and not others and not is_used


def _victim(place: _Place, alive: Sequence[int], rng: random.Random) -> int:
    if place.of_leader or place.phase == "takeover" or (place.phase == "save" and place.index > 0):
        return alive[0]  # only the leader comes there
    return rng.choice(list(alive))


def _at(case: Case, place: _Place, replica: int, rng: random.Random) -> Fault:
    inside = rng.randrange(case.replica_size)
    if case.trainer == "megatron" and place.phase in ("data", "reduce", "save"):
        inside = 0  # not every rank of a replica reads data, or has more than one bucket
    iteration = 0 if place.phase in (*_START, *_FOLLOWING, "exit") else place.iteration
    return Fault(place.kind, replica * case.replica_size + inside, iteration, place.phase, place.index)


def _order(place: _Place) -> tuple[int, int]:
    return place.iteration, list(PHASES).index(place.phase)


def _deadly(menu: Menu, phase: str) -> list[str]:
    """Kinds of which the rank is gone at once, or as soon as a timeout finds it."""
    return [kind for kind in kinds_at(menu, phase) if kind not in (*HARMLESS, "term", "corrupt", "nan")] or ["kill"]
