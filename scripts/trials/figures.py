"""Detection and repair times as a Markdown table for the docs, and as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

_BLUE, _ORANGE, _GREY, _INK = "#0072B2", "#D55E00", "#595959", "#222222"

Samples = Mapping[str, Sequence[float]]


def detection_table(samples: Samples, timeouts: Mapping[str, str]) -> str:
    """One row a kind: median and worst in milliseconds."""
    lines = ["| kind | found by | trials | median (ms) | worst (ms) |", "|---|---|---|---|---|"]
    for kind, values in samples.items():
        found_by = timeouts.get(kind, "its connection or its keeper")
        lines.append(f"| `{kind}` | {found_by} | {len(values)} | {statistics.median(values):.0f} | {max(values):.0f} |")
    return "\n".join(lines)


def repair_table(samples: Samples) -> str:
    """One row a number of ranks: median and worst in milliseconds."""
    lines = ["| ranks | trials | median (ms) | worst (ms) |", "|---|---|---|---|"]
    for ranks, values in samples.items():
        lines.append(f"| {ranks} | {len(values)} | {statistics.median(values):.0f} | {max(values):.0f} |")
    return "\n".join(lines)


def draw_repair(samples: Samples, settle_ms: float, path: Path) -> None:
    """Writes the picture of repair time against ranks (PNG), replacing it in one step."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed, nor looked for
    from matplotlib import pyplot

    ranks = [int(name) for name in samples]
    values = list(samples.values())
    settings = {"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False, "text.color": _INK}
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(7.0, 4.2), layout="constrained")
        try:
            for number, here in zip(ranks, values, strict=True):
                axes.plot([number] * len(here), here, linewidth=0, marker="o", markersize=4, color=_GREY, alpha=0.3)
            axes.plot(ranks, [max(here) for here in values], color=_ORANGE, marker="^", linestyle="--", label="worst")
            medians = [statistics.median(here) for here in values]
            axes.plot(ranks, medians, color=_BLUE, marker="s", linewidth=2, label="median")
            axes.axhline(
                settle_ms, color=_GREY, linewidth=1, linestyle=":", label=f"settling alone ({settle_ms:.0f} ms)"
            )
            axes.set_xscale("log", base=2)
            axes.set_xticks(ranks, [str(number) for number in ranks])
            axes.set_ylim(bottom=0)
            axes.set_xlabel("living ranks before the failure")
            axes.set_ylabel("repair time, slowest rank (ms)")
            axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.legend(frameon=False, loc="lower right")
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.name + ".part")
            figure.savefig(part, dpi=160, format="png")
            part.replace(path)
        finally:
            pyplot.close(figure)
