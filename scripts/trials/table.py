"""What the cases of a run have shown: the table of kinds and moments, totals, and failing cases to repeat."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from megatron_recover.faults import KINDS
from trials.case import HUNG, RESTARTED, SURVIVED, VERDICTS, WRONG, Result, moment, moments

Cells = dict[tuple[str, str], Counter[str]]


def count(results: Sequence[Result]) -> Cells:
    """(kind, moment) -> verdicts. Each fault that happened counts with the verdict of its case."""
    cells: Cells = {}
    for result in results:
        for fault in result.fired:
            cells.setdefault((fault.kind, moment(fault)), Counter())[result.verdict] += 1
    return cells


def build_table(results: Sequence[Result]) -> Table:
    """Rows are moments (in the order of a run), columns are kinds."""
    cells = count(results)
    kinds = [kind for kind in KINDS if any(key[0] == kind for key in cells)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, title_justify="left")
    table.add_column("moment", no_wrap=True)
    for kind in (*kinds, "all"):
        table.add_column(kind, justify="right")
    rows = [name for name in moments() if any(key[1] == name for key in cells)]
    for name in rows:
        here = [cells.get((kind, name), Counter()) for kind in kinds]
        table.add_row(name, *map(_cell, here), _cell(_sum(here)))
    table.add_section()
    columns = [_sum([cells.get((kind, name), Counter()) for name in rows]) for kind in kinds]
    table.add_row("all", *map(_cell, columns), _cell(_sum(columns)))
    return table


def _sum(counters: Sequence[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in counters:
        total += one
    return total


def _cell(verdicts: Counter[str]) -> str:
    """``12``: all survived; ``12+2r``: 2 more by a restart; what went wrong is spelled out."""
    if not verdicts:
        return "-"
    text = str(verdicts[SURVIVED])
    if verdicts[RESTARTED]:
        text += f"+{verdicts[RESTARTED]}r"
    for bad in (HUNG, WRONG):
        if verdicts[bad]:
            text += f" {verdicts[bad]} {bad.upper()}"
    return text


def totals(results: Sequence[Result]) -> dict[str, Any]:
    """The figures of a run."""
    verdicts = Counter(result.verdict for result in results)
    failures = _sum(list(count(results).values()))
    detect = [value for result in results for value in result.detect_ms]
    repair = [value for result in results for value in result.repair_ms]
    return {
        "jobs": len(results),
        "failures": sum(failures.values()),
        "failures_by_verdict": {verdict: failures[verdict] for verdict in VERDICTS},
        "jobs_by_verdict": {verdict: verdicts[verdict] for verdict in VERDICTS},
        "did_not_happen": sum(len(result.missed) for result in results),
        "detect_ms": {"median": _median(detect), "worst": max(detect, default=None)},
        "repair_ms": {"median": _median(repair), "worst": max(repair, default=None)},
        "largest_relative_difference": max((result.largest_difference for result in results), default=0.0),
        "seconds": sum(result.seconds for result in results),
    }


def summary(results: Sequence[Result]) -> list[str]:
    """The figures in sentences."""
    all_of = totals(results)
    by = all_of["failures_by_verdict"]
    lines = [
        f"{all_of['failures']} failures in {all_of['jobs']} jobs: "
        + ", ".join(f"{by[verdict]} {verdict}" for verdict in VERDICTS)
        + f" ({all_of['did_not_happen']} more did not happen: their rank never came there)."
    ]
    for name, word in (("detect_ms", "Noticed after"), ("repair_ms", "repaired in")):
        if all_of[name]["worst"] is not None:
            lines.append(f"{word} {all_of[name]['median']:.0f} ms (median), {all_of[name]['worst']:.0f} ms (worst).")
    lines.append(
        f"Largest relative difference of a loss to the failure-free run: {all_of['largest_relative_difference']:.1e}."
    )
    if all_of["failures"]:
        lines.append(f"{all_of['seconds'] / all_of['failures']:.1f} s for each failure.")
    return lines


def line(result: Result) -> str:
    """One case in one line."""
    what = ", ".join(f"{fault.kind}@{moment(fault)}" for fault in result.fired) or "no fault happened"
    head = (
        f"case {result.number}: {result.verdict} in {result.seconds:.1f} s, {result.case.trainer} {result.case.layout}"
    )
    return f"{head}, {what}" + (
        f"\n  {result.reason}\n  {result.case.command}\n  logs: {result.logs}" if not result.is_good else ""
    )


def write_json(results: Sequence[Result], path: Path, head: dict[str, Any]) -> None:
    """All of it, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = {f"{kind}@{name}": dict(verdicts) for (kind, name), verdicts in count(results).items()}
    text = json.dumps(
        head | {"totals": totals(results), "cells": cells, "cases": [r.as_json() for r in results]}, indent=1
    )
    draft = path.with_name(path.name + ".part")
    draft.write_text(text + "\n")
    draft.replace(path)


def markdown(path: Path) -> str:
    """The table of a run that was written with ``write_json``, for the docs."""
    written: dict[str, dict[str, int]] = json.loads(path.read_text())["cells"]
    cells = {tuple(name.split("@")): Counter(verdicts) for name, verdicts in written.items()}
    kinds = [kind for kind in KINDS if any(key[0] == kind for key in cells)]
    rows = [name for name in moments() if any(key[1] == name for key in cells)]
    lines = ["| moment | " + " | ".join((*kinds, "all")) + " |", "|---" * (len(kinds) + 2) + "|"]
    for name in rows:
        here = [cells.get((kind, name), Counter()) for kind in kinds]
        lines.append(f"| {name} | " + " | ".join(map(_cell, (*here, _sum(here)))) + " |")
    columns = [_sum([cells.get((kind, name), Counter()) for name in rows]) for kind in kinds]
    lines.append("| all | " + " | ".join(map(_cell, (*columns, _sum(columns)))) + " |")
    return "\n".join(lines)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
