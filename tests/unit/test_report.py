"""The demo's report: log lines and events in, a table with the right numbers and a picture out."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import report
from megatron_recover.errors import UserError
from run_log import (
    Run,
    apply_events,
    differences,
    largest_difference,
    parse_events,
    parse_line,
    parse_log,
    read_run,
)
from run_view import RunView, describe

PREFIX = " [2026-08-29 10:00:00.123456] iteration "


def log_line(iteration: int, loss: float, grad_norm: float = 0.987, total: int = 30) -> str:
    """A line as Megatron's training_log prints it."""
    return (
        f"{PREFIX}{iteration:8d}/{total:8d} | consumed samples: {iteration * 16:12d} |"
        " elapsed time per iteration (ms): 512.3 | learning rate: 1.000000E-03 | global batch size:    16 |"
        f" lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {grad_norm:.3f} |"
        " number of skipped iterations:   0 |"
        " number of nan iterations:   0 |"
    )


def event(kind: str, time: float, iteration: int, epoch: int = 0, **more: Any) -> dict[str, Any]:
    return {"event": kind, "time": time, "iteration": iteration, "epoch": epoch, **more}


def failure(time: float, iteration: int, rank: int, phase: str | None, index: int | None) -> dict[str, Any]:
    return event(
        "failure",
        time,
        iteration,
        ranks=[rank],
        replicas=[rank],
        hosts=["a"],
        phase=phase,
        index=index,
        detect_ms=2.5,
    )


def repair(
    time: float, iteration: int, lost: list[int], alive: list[int], repair_ms: float
) -> dict[str, Any]:
    return event(
        "repair",
        time,
        iteration,
        ranks_lost=lost,
        replicas_lost=lost,
        alive=alive,
        repair_ms=repair_ms,
        settle_ms=50.0,
    )


EVENTS = [
    event("start", 1.0, 1, num_ranks=4, replica_size=1, num_replicas=4, policy="balanced", versions={}),
    failure(2.0, 3, 1, "backward", 1),
    repair(2.1, 3, [1], [0, 2, 3], 53.1),
    event("commit", 2.2, 3, 1, rounds=2, redone=4, alive=[0, 2, 3]),
    failure(3.0, 5, 0, "reduce", 2),
    event("takeover", 3.05, 5, 2, leader=2),
    repair(3.1, 5, [0], [2, 3], 54.9),
    event("commit", 3.2, 5, 2, rounds=2, redone=5, alive=[2, 3]),
    event("finish", 4.0, 6, 2, exit_code=0, reason="done"),
]


def run_of(losses: list[float], events: list[dict[str, Any]]) -> Run:
    run = Run(parse_log(log_line(i, loss) for i, loss in enumerate(losses, start=1)))
    apply_events(run, events)
    return run


def test_a_line_of_the_log() -> None:
    point = parse_line(log_line(5, 6.123456))
    assert point is not None
    assert (point.iteration, point.total) == (5, 30)
    assert (point.loss, point.grad_norm, point.elapsed_ms) == (6.123456, 0.987, 512.3)
    # mpirun may tag the line, other fields may stand between, and a loss may be no number
    tagged = parse_line(
        "[1,0]<stdout>:" + log_line(7, math.nan).replace("lm loss", "mtp_1 loss: 1.0E+00 | lm loss")
    )
    assert tagged is not None
    assert tagged.iteration == 7
    assert math.isnan(tagged.loss)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "training ...",
        " validation loss at iteration 10 | lm loss value: 5.1E+00 | lm loss PPL: 1.6E+02 |",
        "iteration 5/ 10 | consumed samples: 3 |",
        "saving checkpoint at iteration       5 to checkpoints",
    ],
)
def test_other_lines_are_passed_over(line: str) -> None:
    assert parse_line(line) is None


def test_events_become_failures() -> None:
    run = run_of([5.0] * 6, EVENTS)
    first, second = run.failures
    assert (first.iteration, first.ranks, first.where) == (3, [1], "backward, microbatch 1")
    assert (first.detect_ms, first.repair_ms, first.redone, first.alive) == (2.5, 53.1, 4, [0, 2, 3])
    assert (second.where, second.repair_ms, second.redone, second.alive) == (
        "reduce, bucket 2",
        54.9,
        5,
        [2, 3],
    )
    assert (run.num_replicas, run.alive_at_end, run.redone, run.exit_code) == (4, 2, 9, 0)


def test_two_failures_in_one_repair_and_one_after_the_commit() -> None:
    events = [
        EVENTS[0],
        failure(2.0, 3, 1, "reduce", 0),
        failure(2.0, 3, 2, None, None),
        repair(2.1, 3, [1, 2], [0, 3], 60.0),
        event("commit", 2.2, 3, 1, rounds=2, redone=8, alive=[0, 3]),
        failure(3.0, 4, 3, "optimizer", None),
        repair(3.1, 5, [3], [0], 51.0),  # seen at the start of the next iteration, nothing to redo
    ]
    run = run_of([5.0] * 6, events)
    assert [f.repair_ms for f in run.failures] == [60.0, 60.0, 51.0]
    assert [f.redone for f in run.failures] == [8, 0, 0]
    assert [f.where for f in run.failures] == ["reduce, bucket 0", "-", "optimizer"]
    assert (run.redone, run.alive_at_end) == (8, 1)


def test_events_out_of_order_and_cut_off() -> None:
    lines = [json.dumps(e) for e in reversed(EVENTS)] + ['{"event": "fail', "[]", ""]
    assert parse_events(lines) == EVENTS


def test_differences() -> None:
    reference = run_of([5.0, 4.0, 3.0], [])
    run = run_of([5.0, 4.000001, 2.9, 2.0], [])
    assert largest_difference(reference, run, "loss")[0] == 3
    assert largest_difference(reference, run, "loss")[1] == pytest.approx(0.1)
    assert largest_difference(reference, run, "grad_norm") == (1, 0.0)
    broken = run_of([5.0, math.nan], [])
    assert differences(reference, broken, "loss")[2] == math.inf
    assert differences(broken, broken, "loss")[2] == 0.0
    with pytest.raises(UserError, match="no iteration in common"):
        largest_difference(reference, Run({}), "loss")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    losses = [7.5 - 0.3 * i for i in range(6)]
    (tmp_path / "reference.log").write_text(
        "starting\n" + "\n".join(log_line(i + 1, x) for i, x in enumerate(losses))
    )
    losses[4] += 2e-6
    (tmp_path / "train.log").write_text(
        "\n".join(log_line(i + 1, x) for i, x in enumerate(losses)) + "\nend\n"
    )
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in EVENTS))
    return tmp_path


def test_the_table_holds_the_numbers(folder: Path) -> None:
    reference, run = read_run(folder, ("reference.log",)), read_run(folder, ("train.log",))
    out = io.StringIO()
    largest = report.report(reference, run, folder / "loss.png", Console(file=out, width=80))
    assert largest == pytest.approx(2e-6, abs=1e-9)
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert ["3", "1", "(1)", "backward,", "microbatch", "1", "2.5", "53.1", "4", "0,", "2,", "3"] in rows
    assert ["5", "0", "(0)", "reduce,", "bucket", "2", "2.5", "54.9", "5", "2,", "3"] in rows
    assert ["iterations", "6", "6"] in rows
    assert ["replicas", "lost", "2", "0"] in rows
    assert ["microbatches", "redone", "9", "0"] in rows
    assert ["alive", "replicas", "at", "the", "end", "2", "of", "4", "-"] in rows
    assert ["loss", "at", "iteration", "6", "6.000000", "6.000000"] in rows
    assert ["largest", "|loss", "difference|", "2.00e-06", "at", "iteration", "5"] in rows
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("offset", [0.0, math.nan, 100.0])
def test_the_picture_is_written_for_any_curves(folder: Path, offset: float) -> None:
    reference = read_run(folder, ("reference.log",))
    run = run_of([7.5 + offset, 7.2, 6.9], EVENTS[:2])
    report.draw(reference, run, folder / "new" / "a.png")
    assert (folder / "new" / "a.png").stat().st_size > 10_000
    assert [file.name for file in (folder / "new").iterdir()] == ["a.png"]


def test_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--reference", str(folder), "--run", str(folder)]) == 0
    assert (folder / "loss.png").exists()
    assert report.main(["--reference", str(folder / "none"), "--run", str(folder)]) == 2
    assert "there is no log" in capsys.readouterr().err
    (folder / "train.log").write_text("nothing\n")
    assert report.main(["--reference", str(folder), "--run", str(folder)]) == 2
    assert "no line of it reports" in capsys.readouterr().err


def test_the_view_follows_log_and_events(folder: Path) -> None:
    out = io.StringIO()
    events = folder / "live.jsonl"
    with RunView("with failures", 30, 4, events, Console(file=out, width=100)) as view:
        view.tick()  # no events yet
        view.line("noise")
        view.line(log_line(1, 7.5))
        first, second = json.dumps(EVENTS[1]), json.dumps(EVENTS[2])
        events.write_text(first + "\n" + second[:20])
        view.tick()
        assert "repaired" not in out.getvalue()
        events.write_text(first + "\n" + second + "\n")
        view.tick()
        view.tick()
        view.finish(True)
    shown = out.getvalue()
    assert "iteration 1/30: loss 7.5000" in shown
    assert shown.count("iteration 3: rank 1 lost (backward, microbatch 1)") == 1
    assert shown.count("iteration 3: repaired in 53.1 ms, 3 replicas go on") == 1
    assert "\x1b" not in shown
    assert describe(EVENTS[3]) == "iteration 3: 4 microbatches redone, none lost"
    assert describe(EVENTS[0]) is None
