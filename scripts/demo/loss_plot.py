"""``loss.png``: both loss curves over each other, the failures, and the difference of the curves below."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from run_log import Failure, Run, differences

# Okabe and Ito's palette, which stays apart for the colour-blind
_BLUE, _ORANGE, _VERMILLION, _GREY = "#0072B2", "#E69F00", "#D55E00", "#595959"
_INK = "#222222"


def draw(reference: Run, run: Run, path: Path) -> None:
    """Write the picture to ``path`` (PNG), replacing it in one step.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed, nor looked for
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    settings = {
        "font.size": 10.5,
        "axes.edgecolor": _GREY,
        "axes.labelcolor": _INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": _GREY,
        "ytick.color": _GREY,
        "text.color": _INK,
    }
    with pyplot.rc_context(settings):
        figure, (upper, lower) = pyplot.subplots(
            2, 1, figsize=(9.0, 6.0), sharex=True, height_ratios=(3, 1.15), layout="constrained"
        )
        try:
            _draw_losses(upper, reference, run)
            _draw_differences(lower, reference, run)
            for axes in (upper, lower):
                axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
                axes.set_axisbelow(True)
            _mark_failures(upper, lower, run.failures)
            lower.set_xlabel("iteration")
            lower.xaxis.set_major_locator(MaxNLocator(integer=True))
            figure.suptitle(_title(reference, run), x=0.01, ha="left", fontsize=13, fontweight="bold")
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.name + ".part")
            figure.savefig(part, dpi=160, format="png")
            part.replace(path)
        finally:
            pyplot.close(figure)


def _title(reference: Run, run: Run) -> str:
    lost = sum(len(failure.replicas) or 1 for failure in run.failures)
    of = "" if run.num_replicas is None else f" of {run.num_replicas}"
    largest = max(differences(reference, run, "loss").values(), default=math.nan)
    difference = f"largest difference in loss {largest:.1e}" if largest else "no difference in loss"
    return f"{lost}{of} replicas lost; {difference}"


def _draw_losses(axes: Any, reference: Run, run: Run) -> None:
    its = sorted(reference.points)
    # wide and pale below, narrow and dark above: both are seen where they coincide
    axes.plot(its, [reference.points[i].loss for i in its], color=_ORANGE, linewidth=6, alpha=0.55,
              solid_capstyle="round", label="failure-free run")  # fmt: skip
    its = sorted(run.points)
    axes.plot(its, [run.points[i].loss for i in its], color=_BLUE, linewidth=1.6,
              marker="o" if len(its) <= 60 else None, markersize=3.5, label="run with failures")  # fmt: skip
    axes.set_ylabel("training loss (nats per token)")
    axes.legend(loc="lower left", frameon=True, framealpha=0.9, edgecolor="none")


def _draw_differences(axes: Any, reference: Run, run: Run) -> None:
    found = {i: d for i, d in differences(reference, run, "loss").items() if math.isfinite(d)}
    # The log prints seven digits; below half of the last one, a difference cannot be seen at all.
    largest_loss = max(
        (abs(p.loss) for p in reference.points.values() if math.isfinite(p.loss) and p.loss), default=1.0
    )
    digit = 10.0 ** (math.floor(math.log10(largest_loss)) - 6)
    axes.set_yscale("symlog", linthresh=digit, linscale=0.6)
    axes.axhspan(
        0, digit, color=_GREY, alpha=0.12, linewidth=0, label=f"below the log's last digit ({digit:.0e})"
    )
    axes.plot(list(found), list(found.values()), color=_INK, linewidth=0, marker="o", markersize=3.5,
              clip_on=False, zorder=3)  # fmt: skip
    top = max([*found.values(), digit])
    axes.set_ylim(0, 10.0 ** (math.floor(math.log10(top)) + 2))
    axes.set_ylabel("|difference|\n(nats per token)")
    axes.legend(loc="upper left", frameon=True, framealpha=0.9, edgecolor="none", fontsize=9)


def _mark_failures(upper: Any, lower: Any, failures: list[Failure]) -> None:
    """Vertical lines where replicas were lost, each with a label; labels step down so as not to meet."""
    for number, failure in enumerate(failures):
        for axes in (upper, lower):
            axes.axvline(
                failure.iteration, color=_VERMILLION, linewidth=1.3, linestyle=(0, (4, 2)), zorder=1.5
            )
        ranks = ", ".join(map(str, failure.ranks)) or "?"
        text = f"rank {ranks} lost\n{failure.where}"
        if failure.alive:
            text += f"\n{len(failure.alive)} replicas left"
        upper.annotate(
            text,
            xy=(failure.iteration, 0.97 - 0.2 * (number % 3)),
            xycoords=("data", "axes fraction"),
            xytext=(6, 0),
            textcoords="offset points",
            va="top",
            fontsize=9.5,
            color=_VERMILLION,
            bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )
