"""Turns the result file of `make test-all` into the table of docs/reliability.md.

    python scripts/failure_table.py runs/test-all.xml
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from xml.etree import ElementTree

TEST = "test_one_rank_killed"


def read_cells(path: Path) -> list[dict[str, str]]:
    """Properties of each cell of the failure matrix; ``outcome`` is survived, failed or skipped."""
    cells = []
    for case in ElementTree.parse(path).iter("testcase"):
        if not case.get("name", "").startswith(TEST):
            continue
        cell = {one.get("name", ""): one.get("value", "") for one in case.iter("property")}
        bad = case.find("failure") is not None or case.find("error") is not None
        cell["outcome"] = "failed" if bad else "skipped" if case.find("skipped") is not None else "survived"
        cell["name"] = case.get("name", "")
        cells.append(cell)
    return cells


def table(cells: list[dict[str, str]]) -> str:
    """Markdown: one row a layout, one column a phase; detection and repair in milliseconds."""
    layouts = list(dict.fromkeys(cell["layout"] for cell in cells if "layout" in cell))
    phases = list(dict.fromkeys(cell["phase"] for cell in cells if "phase" in cell))
    lines = ["| layout | " + " | ".join(phases) + " |", "|---|" + "---|" * len(phases)]
    for layout in layouts:
        row = [layout]
        for phase in phases:
            (cell,) = [one for one in cells if (one.get("layout"), one.get("phase")) == (layout, phase)] or [{}]
            times = f"{float(cell['detect_ms']):.0f} + {float(cell['repair_ms']):.0f}" if "repair_ms" in cell else "-"
            row.append(times if cell.get("outcome") == "survived" else f"**{cell.get('outcome', 'not run')}**")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def summary(cells: list[dict[str, str]]) -> str:
    """One sentence with the counts and the figures over all cells."""
    survived = [cell for cell in cells if cell["outcome"] == "survived"]
    detect = sorted(float(cell["detect_ms"]) for cell in survived if "detect_ms" in cell)
    repair = sorted(float(cell["repair_ms"]) for cell in survived if "repair_ms" in cell)
    worst = max((float(cell["largest_relative_difference"]) for cell in survived), default=0.0)
    return (
        f"{len(survived)} of {len(cells)} cells survived. Detection: median {statistics.median(detect):.0f} ms, "
        f"worst {detect[-1]:.0f} ms. Repair: median {statistics.median(repair):.0f} ms, worst {repair[-1]:.0f} ms. "
        f"Largest relative loss difference to the failure-free run: {worst:.1e}."
    )


def main() -> None:
    """Prints summary and table of the file in argv[1]."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        raise SystemExit("usage: python scripts/failure_table.py RESULT.xml  (make test-all writes runs/test-all.xml)")
    cells = read_cells(Path(sys.argv[1]))
    if not cells:
        raise SystemExit(f"{sys.argv[1]} has no result of the failure matrix: run make test-all")
    print(summary(cells), table(cells), sep="\n\n")


if __name__ == "__main__":
    main()
