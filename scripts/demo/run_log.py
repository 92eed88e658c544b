"""What one run says about itself: Megatron's log lines and ``events.jsonl``, as plain data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_recover.errors import UserError
from megatron_recover.telemetry import events as event_log

_ITERATION = re.compile(r"iteration\s+(?P<iteration>\d+)/\s*(?P<total>\d+)\s*\|")
_FIELD = re.compile(
    r"(?P<name>[A-Za-z][^:|]*?):\s*(?P<value>[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))\s*(?:\||$)",
    re.IGNORECASE,
)
_INDEXED_PHASES = {
    "forward": "microbatch",
    "backward": "microbatch",
    "data": "microbatch",
    "reduce": "bucket",
}


@dataclass(frozen=True, slots=True)
class Point:
    """One iteration as logged."""

    iteration: int
    total: int
    """Iterations that the run is to have (``--train-iters``)."""
    loss: float
    grad_norm: float | None
    elapsed_ms: float | None


@dataclass(slots=True)
class Failure:
    """One lost rank or group of ranks, with the repair that followed."""

    iteration: int
    ranks: list[int]
    replicas: list[int]
    phase: str | None
    index: int | None
    detect_ms: float | None
    repair_ms: float | None = None
    redone: int = 0
    """Microbatches run again because of it (of the whole iteration, given to the first failure in it)."""
    alive: list[int] = field(default_factory=list)
    """Living replicas after the repair."""

    @property
    def where(self) -> str:
        """The phase in words, for example ``backward, microbatch 1``."""
        if self.phase is None:
            return "-"
        kind = _INDEXED_PHASES.get(self.phase)
        return self.phase if self.index is None or kind is None else f"{self.phase}, {kind} {self.index}"


@dataclass(slots=True)
class Run:
    """A run's curve and what happened in it."""

    points: dict[int, Point]
    failures: list[Failure] = field(default_factory=list)
    redone: int = 0
    """Microbatches run again, over the whole run."""
    num_replicas: int | None = None
    """Replicas at start; None where there are no events."""
    alive_at_end: int | None = None
    exit_code: int | None = None


def parse_line(line: str) -> Point | None:
    """The iteration that a line of Megatron's log reports; None for any other line (evaluation too)."""
    match = _ITERATION.search(line)
    if match is None:
        return None
    values = {m["name"].strip(): float(m["value"]) for m in _FIELD.finditer(line, match.end())}
    if "lm loss" not in values:
        return None
    return Point(
        iteration=int(match["iteration"]),
        total=int(match["total"]),
        loss=values["lm loss"],
        grad_norm=values.get("grad norm"),
        elapsed_ms=values.get("elapsed time per iteration (ms)"),
    )


def parse_log(lines: Iterable[str]) -> dict[int, Point]:
    """All logged iterations; where one is there twice (after a restart), the later line counts."""
    return {point.iteration: point for point in map(parse_line, lines) if point is not None}


def parse_events(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The events in order of time. A line that a killed process left half written is passed over."""
    return sorted(event_log.parse_events(lines), key=lambda event: event.get("time", 0.0))


def apply_events(run: Run, events: Iterable[dict[str, Any]]) -> None:
    """Fill ``run`` from its events: each repair settles the failures seen since the one before it."""
    unrepaired: list[Failure] = []
    uncommitted: list[Failure] = []
    for event in events:
        kind = event["event"]
        if kind == "start":
            run.num_replicas = run.alive_at_end = event.get("num_replicas")
        elif kind == "failure":
            failure = Failure(
                iteration=event["iteration"],
                ranks=sorted(event.get("ranks") or []),
                replicas=sorted(event.get("replicas") or []),
                phase=event.get("phase"),
                index=event.get("index"),
                detect_ms=event.get("detect_ms"),
            )
            run.failures.append(failure)
            unrepaired.append(failure)
            uncommitted.append(failure)
        elif kind == "repair":
            alive = sorted(event.get("alive") or [])
            for failure in unrepaired:
                failure.repair_ms, failure.alive = event.get("repair_ms"), alive
            unrepaired = []
            run.alive_at_end = len(alive)
        elif kind == "commit":
            redone = int(event.get("redone") or 0)
            run.redone += redone
            if uncommitted:
                uncommitted[0].redone = redone
            uncommitted = []
        elif kind == "finish":
            run.exit_code = event.get("exit_code")


def read_run(path: Path, log_names: Iterable[str]) -> Run:
    """Read a run folder: the first of ``log_names`` that is there, and ``events.jsonl`` where it is there.

    Args:
        path: the folder, or a log file (then ``events.jsonl`` beside it is not read).
        log_names: candidates for the log's name.

    Raises:
        UserError: no log, or no iteration in it.
    """
    log = (
        path if path.is_file() else next((path / name for name in log_names if (path / name).is_file()), None)
    )
    if log is None:
        raise UserError(f"{path}: there is no log ({' or '.join(log_names)}) of a run.")
    run = Run(parse_log(_lines(log)))
    if not run.points:
        raise UserError(f"{log}: no line of it reports an iteration's loss; run with --log-interval 1.")
    events = path / "events.jsonl"
    if path.is_dir() and events.is_file() and log.name != "reference.log":
        apply_events(run, parse_events(_lines(events)))
    return run


def largest_difference(
    reference: Run, run: Run, field_name: Literal["loss", "grad_norm"]
) -> tuple[int, float]:
    """Iteration and size of the largest absolute difference over the iterations that both runs logged.

    A value that is not a number in one run only counts as infinitely different.

    Raises:
        UserError: no common iteration.
    """
    found = differences(reference, run, field_name)
    if not found:
        raise UserError(
            "The two runs have no iteration in common; use the same --train-iters and --log-interval 1."
        )
    at = max(found, key=lambda iteration: found[iteration])
    return at, found[at]


def differences(reference: Run, run: Run, field_name: Literal["loss", "grad_norm"]) -> dict[int, float]:
    """Absolute difference of a value for every iteration that both runs logged."""
    found = {}
    for iteration in sorted(reference.points.keys() & run.points.keys()):
        a, b = getattr(reference.points[iteration], field_name), getattr(run.points[iteration], field_name)
        if a is None or b is None:
            continue
        same = a == b or (math.isnan(a) and math.isnan(b))
        difference = 0.0 if same else abs(a - b)
        found[iteration] = math.inf if math.isnan(difference) else difference
    return found


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()
