"""What both trainers have in common: from an ended job to a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_recover.telemetry.events import read_events
from trials.case import HUNG, RESTARTED, SURVIVED, WRONG, Case, Result, lost_replicas
from trials.jobs import Ended, happened

TOLERANCE = 1e-5
"""Largest relative difference of a loss to the failure-free run."""
HEARTBEAT_TIMEOUT_S, PROGRESS_TIMEOUT_S, REPAIR_TIMEOUT_S = 2.0, 4.0, 20.0
"""Shorter than a user would set them, so that ``stop``, ``gil`` and ``hang`` do not take minutes."""
SETUP_TIMEOUT_S, START_TIMEOUT_S = 30.0, 120.0
LAUNCHER_OPTIONS = ("--max-restarts", "2", "--start-timeout", f"{START_TIMEOUT_S:g}")
"""A job that gives up is started again, as on a cluster."""


class Wrong(Exception):
    """A run that did not come to what it has to."""


@dataclass
class Findings:
    """What a trainer reads from the output of a job that ended with 0."""

    tries: int
    alive: Sequence[int] | None
    """Living replicas as the job saw them at its end, if it says so."""
    largest_difference: float
    events: list[dict[str, Any]] = field(default_factory=list)


def judge(case: Case, number: int, ended: Ended, folder: Path, read: Any) -> Result:
    """The verdict on a job. ``read(case, ended, folder)`` returns findings or raises ``Wrong``."""
    result = Result(case, number, SURVIVED, seconds=ended.seconds, exit_code=ended.code, logs=str(folder))
    result.fired = happened(ended.err, case.faults)
    events = read_events(folder / "events.jsonl") if (folder / "events.jsonl").exists() else []
    result.detect_ms = [e["detect_ms"] for e in events if e["event"] == "failure" and e["detect_ms"] is not None]
    result.repair_ms = [e["repair_ms"] for e in events if e["event"] == "repair"]
    if ended.timed_out:
        result.verdict, result.reason = HUNG, f"had not ended after {case.deadline_s:.0f} s; stacks are in err.log"
        return result
    try:
        if ended.code != 0:
            raise Wrong(f"exit code {ended.code}: {ended.last_words}")
        findings: Findings = read(case, ended, folder)
        result.tries, result.largest_difference = findings.tries, findings.largest_difference
        if findings.tries == 1 and findings.alive is not None:
            _check_alive(case, result, findings.alive)
        result.verdict = SURVIVED if findings.tries == 1 else RESTARTED
    except Wrong as problem:
        result.verdict, result.reason = WRONG, str(problem)
    return result


def _check_alive(case: Case, result: Result, alive: Iterable[int]) -> None:
    lost = set(range(case.num_replicas)) - set(alive)
    must, may = lost_replicas(case, result.fired)
    if not must <= lost:
        raise Wrong(f"replicas {sorted(must - lost)} had a fault and are said to live")
    if not lost <= may:
        raise Wrong(f"replicas {sorted(lost - may)} were lost without a fault")


def difference(ours: Mapping[int, Sequence[float]], theirs: Mapping[int, Sequence[float]], what: str) -> float:
    """Largest relative difference of all values.

    Raises:
        Wrong: it is more than ``TOLERANCE``, or values are missing.
    """
    largest = 0.0
    for number, values in ours.items():
        expected = theirs.get(number, ())
        if len(values) != len(expected):
            raise Wrong(f"{what} of iteration {number}: {len(values)} values, {len(expected)} expected")
        for one, other in zip(values, expected, strict=True):
            relative = abs(one - other) / max(abs(other), 1e-9)
            if not math.isfinite(one) or relative > TOLERANCE:
                raise Wrong(f"{what} of iteration {number} is {one}, without failures {other}")
            largest = max(largest, relative)
    return largest
