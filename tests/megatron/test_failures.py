"""One rank killed in every phase of an iteration, for every layout; more of them at once; too many of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from failure_matrix import ITERATION, PHASES, Cell, cells, in_slice
from training_runs import LAYOUTS, assert_same_curve, assert_survived, recover, vanilla

from megatron_recover.errors import ExitCode

ITERATIONS = 8


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=cell.name, marks=[] if in_slice(cell) else [pytest.mark.slow]) for cell in cells()],
)
def test_one_rank_killed(cell: Cell, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    num_ranks, size, flags = LAYOUTS[cell.layout]
    curve = recover(num_ranks, f"{cell.flags} --save {tmp_path}", iterations=ITERATIONS, inject=[cell.spec])
    # One replica without a failure is vanilla Megatron; that vanilla does not depend on the number of
    # replicas is shown in test_no_failure.
    reference = vanilla(size, flags)
    assert_survived(curve, reference, iterations=ITERATIONS, lost=[cell.victim // size])
    (failure,) = curve.of("failure")
    assert cell.victim in failure["ranks"]
    assert failure["phase"] == cell.phase
    assert failure["detect_ms"] >= 0
    (repair,) = curve.of("repair")
    for name in ("layout", "phase", "overlap", "policy", "leader"):  # for the table of docs/reliability.md
        record_property(name, getattr(cell, name))
    record_property("detect_ms", failure["detect_ms"])
    record_property("repair_ms", repair["repair_ms"])
    differences = [abs(loss - reference.losses[n]) / reference.losses[n] for n, loss in curve.losses.items()]
    record_property("largest_relative_difference", max(differences))
    # What a phase after the commit loses is noticed at once, or in the next iteration.
    assert ITERATION <= failure["iteration"] <= ITERATION + 1
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(ITERATIONS)
    if cell.phase in ("data", "forward", "backward", "reduce", "commit"):
        (commit,) = curve.of("commit")
        assert commit["iteration"] == ITERATION
        assert commit["rounds"] == 2
        assert commit["redone"] == len(range(cell.victim // size, 8, num_ranks // size))


def test_the_slice_has_every_phase_and_layout() -> None:
    chosen = [cell for cell in cells() if in_slice(cell)]
    assert {cell.phase for cell in chosen} == set(PHASES)
    assert {cell.layout for cell in chosen} == set(LAYOUTS)
    for one, other in itertools.combinations(("layout", "overlap", "policy", "leader"), 2):
        pairs = {(getattr(cell, one), getattr(cell, other)) for cell in cells()}
        assert {(getattr(cell, one), getattr(cell, other)) for cell in chosen} == pairs


def test_two_replicas_lost_in_the_same_reduction() -> None:
    kills = [f"kill:rank={rank},iteration=3,phase=reduce,bucket={rank}" for rank in (1, 2)]
    curve = recover(4, "--overlap-grad-reduce", iterations=6, inject=kills)
    assert_survived(curve, vanilla(1), iterations=6, lost=[1, 2])


@pytest.mark.slow
def test_three_lost_one_after_another_down_to_one_the_leader_each_time() -> None:
    kills = [
        "kill:rank=0,iteration=2,phase=backward,microbatch=0",
        "kill:rank=1,iteration=4,phase=optimizer",
        "kill:rank=2,iteration=6,phase=forward,microbatch=1",
    ]
    curve = recover(4, iterations=8, inject=kills)
    assert_survived(curve, vanilla(1), iterations=8, lost=[0, 1, 2])
    assert [event["leader"] for event in curve.of("takeover")] == [1, 2, 3]
    assert [event["epoch"] for event in curve.of("repair")] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["exit", "exception"])
@pytest.mark.slow
def test_other_ways_to_die(kind: str) -> None:
    curve = recover(3, iterations=5, inject=[f"{kind}:rank=1,iteration=3,phase=backward,microbatch=1"])
    assert_survived(curve, vanilla(1), iterations=5, lost=[1])


def test_below_the_minimum_it_saves_and_the_run_resumes_on_what_is_left(tmp_path: Path) -> None:
    save = f"--save {tmp_path} --save-interval 1000 --recover-min-replicas 2"
    kills = ["kill:rank=0,iteration=3,phase=reduce,bucket=0", "kill:rank=2,iteration=5,phase=forward,microbatch=0"]
    stopped = recover(3, save, iterations=10, inject=kills, code=ExitCode.TOO_FEW_REPLICAS)
    reference = vanilla(1)
    assert sorted(stopped.losses) == [1, 2, 3, 4]
    assert_same_curve(stopped, reference)
    assert "1 of 3 replicas are left, fewer than --recover-min-replicas 2" in stopped.done.err
    assert f"the state after iteration 4 is saved in {tmp_path}" in stopped.done.err
    assert stopped.of("finish")[-1]["exit_code"] == ExitCode.TOO_FEW_REPLICAS

    resumed = recover(1, f"--load {tmp_path}", iterations=10)
    assert sorted(resumed.losses) == [5, 6, 7, 8, 9, 10]
    # Megatron logs the mean of the first two losses after a resume as the second one; its norm is right.
    del resumed.losses[6]
    assert resumed.grad_norms[6] == pytest.approx(reference.grad_norms[6], rel=1e-3)
    assert_same_curve(resumed, reference)
