"""Compare a run that lost replicas with a failure-free run of the same thing: a table and ``loss.png``.

    python scripts/demo/report.py --reference runs/a --run runs/b [--out runs/b/loss.png]

A run folder holds a Megatron log (``train.log``, or ``reference.log``) and, for the run with failures,
``events.jsonl``. Iterations count from 1 and ranks are start ranks, as everywhere a user sees them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from loss_plot import draw
from megatron_recover.errors import UserError
from run_log import Failure, Point, Run, largest_difference, read_run

_LOOK: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "title_justify": "left",
    "title_style": "bold",
    "padding": (0, 1, 0, 0),  # the failures fit a terminal of 80 columns
    "pad_edge": False,
    "show_edge": False,
}
_PLAIN_WIDTH = 100
"""Columns used where there is no terminal to ask, as in a log file."""


def build_tables(reference: Run, run: Run) -> tuple[Table, Table]:
    """The table of failures and the table of the whole run.

    Raises:
        UserError: the two runs have no iteration in common.
    """
    failures = Table(title="Failures", **_LOOK)
    failures.add_column("iteration", justify="right")
    failures.add_column("lost rank\n(replica)", justify="right")
    failures.add_column("in phase", no_wrap=True)
    failures.add_column("detect\n(ms)", justify="right")
    failures.add_column("repair\n(ms)", justify="right")
    failures.add_column("micro-\nbatches\nredone", justify="right")
    failures.add_column("alive\nreplicas", no_wrap=True)
    for failure in run.failures:
        failures.add_row(*_failure_row(failure))

    at, loss_difference = largest_difference(reference, run, "loss")
    last = max(run.points)
    summary = Table(title="Run", **_LOOK)
    summary.add_column("")
    summary.add_column("with failures", justify="right")
    summary.add_column("failure-free", justify="right")
    summary.add_row("iterations", str(len(run.points)), str(len(reference.points)))
    summary.add_row("replicas lost", str(sum(len(f.replicas) for f in run.failures)), "0")
    summary.add_row("microbatches redone", str(run.redone), "0")
    summary.add_row("alive replicas at the end", _alive(run), _alive(reference))
    summary.add_row(
        f"loss at iteration {last}", _number(run.points.get(last)), _number(reference.points.get(last))
    )
    summary.add_row(
        "largest |loss difference|", f"{loss_difference:.2e}", f"at iteration {at}" if loss_difference else ""
    )
    if any(point.grad_norm is not None for point in run.points.values()):
        at, difference = largest_difference(reference, run, "grad_norm")
        summary.add_row(
            "largest |grad norm difference|", f"{difference:.2e}", f"at iteration {at}" if difference else ""
        )
    return failures, summary


def make_console() -> Console:
    """A console on stdout, of a fixed width where stdout is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)


def report(reference: Run, run: Run, picture: Path, console: Console) -> float:
    """Print both tables and write the picture; returns the largest absolute loss difference.

    Raises:
        UserError: the runs have no iteration in common, or the picture cannot be written.
    """
    failures, summary = build_tables(reference, run)
    console.print()
    console.print(failures if run.failures else "No failures.")
    console.print()
    console.print(summary)
    console.print()
    try:
        draw(reference, run, picture)
    except OSError as error:
        raise UserError(f"--out {picture}: cannot be written ({error.strerror or error}).") from error
    console.print(f"Picture: {picture}", highlight=False, soft_wrap=True)
    return largest_difference(reference, run, "loss")[1]


def _failure_row(failure: Failure) -> list[str]:
    return [
        str(failure.iteration),
        f"{', '.join(map(str, failure.ranks)) or '-'} ({', '.join(map(str, failure.replicas)) or '-'})",
        failure.where,
        _milliseconds(failure.detect_ms),
        _milliseconds(failure.repair_ms),
        str(failure.redone),
        ", ".join(map(str, failure.alive)) or "-",
    ]


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _number(point: Point | None) -> str:
    return "-" if point is None else f"{point.loss:.6f}"


def _alive(run: Run) -> str:
    if run.num_replicas is None:
        return "-"
    return f"{run.alive_at_end} of {run.num_replicas}"


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare a run with failures with a failure-free one.")
    parser.add_argument(
        "--reference", type=Path, required=True, metavar="DIR", help="folder (or log) without failures"
    )
    parser.add_argument(
        "--run", type=Path, required=True, metavar="DIR", help="folder (or log) with failures"
    )
    parser.add_argument(
        "--out", type=Path, default=None, metavar="PNG", help="picture (default: loss.png in --run)"
    )
    args = parser.parse_args(argv)
    try:
        reference = read_run(args.reference, ("reference.log", "train.log"))
        run = read_run(args.run, ("train.log",))
        folder = args.run if args.run.is_dir() else args.run.parent
        report(reference, run, args.out or folder / "loss.png", make_console())
    except UserError as error:
        print(f"report: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
