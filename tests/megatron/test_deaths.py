"""Kinds of death other than SIGKILL, and moments outside of iterations, on the real Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_runs import assert_same_curve, assert_survived, recover, vanilla

from megatron_recover.errors import ExitCode

TP2 = "--tensor-model-parallel-size 2"
HERE = Path(__file__).parent


def test_stopped_hanging_and_gone_without_a_word() -> None:
    """Each time the other rank of the replica is stuck in a collective of it."""
    flags = f"{TP2} --recover-heartbeat-timeout 3 --recover-progress-timeout 8"
    faults = [
        "stop:rank=0,iteration=2,phase=forward,microbatch=0",
        "hang:rank=3,iteration=3,phase=backward,microbatch=0",
        "crash:rank=5,iteration=4,phase=optimizer",
    ]
    curve = recover(8, flags, iterations=6, inject=faults)
    assert_survived(curve, vanilla(2, TP2), iterations=6, lost=[0, 1, 2])
    assert "it is stopped" in curve.done.err
    assert "has made no progress for" in curve.done.err
    assert 3000 <= curve.of("failure")[0]["detect_ms"] < 20_000


@pytest.mark.slow
def test_moments_outside_of_iterations() -> None:
    """While the others build models and data sets, as the next leader takes over, in a repair, at the very end."""
    faults = [
        "kill:rank=1,phase=init",
        "kill:rank=2,phase=model",
        "kill:rank=0,phase=datasets",
        "kill:rank=4,iteration=2,phase=backward,microbatch=0",
        "kill:rank=5,phase=repair,step=2",
        "kill:rank=3,phase=takeover",
        "kill:rank=6,phase=exit",
    ]
    curve = recover(8, iterations=4, inject=faults)
    assert_same_curve(curve, vanilla(1))
    assert max(curve.losses) == 4


def test_a_replica_leaves_in_order_and_an_odd_one_is_dropped(tmp_path: Path) -> None:
    faults = ["term:rank=0,iteration=2,phase=forward,microbatch=0", "corrupt:rank=2,iteration=4,phase=optimizer"]
    curve = recover(4, f"--save {tmp_path} --save-interval 100", iterations=6, inject=faults)
    assert_survived(curve, vanilla(1), iterations=6, lost=[0, 2])
    first, second = curve.of("leave")
    assert (first["replicas"], first["reason"]) == ([0], "it was sent SIGTERM")
    assert second["replicas"] == [2]
    assert "majority" in second["reason"]
    assert not curve.of("failure")
    (commit,) = curve.of("commit")  # only the odd one's microbatches had to be run again
    assert commit["iteration"] == 5


@pytest.mark.slow
def test_all_are_sent_sigterm(tmp_path: Path) -> None:
    faults = [f"term:rank={rank},iteration=3,phase=forward,microbatch=0" for rank in range(2)]
    save = f"--save {tmp_path} --save-interval 100"
    curve = recover(2, save, iterations=6, inject=faults, code=ExitCode.SAVED_ON_SIGNAL)
    assert max(curve.losses) == 3
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert "every replica was sent SIGTERM" in curve.done.err


@pytest.mark.parametrize("layout", ["dp", "pp2"])
@pytest.mark.slow
def test_a_loss_that_is_nan_is_named(layout: str) -> None:
    num_ranks, flags = (3, "") if layout == "dp" else (4, "--pipeline-model-parallel-size 2")
    script = str(HERE / "poison_program.py")
    curve = recover(num_ranks, flags, iterations=5, script=script, code=ExitCode.NOT_FINITE)
    replica = 5 % 3 if layout == "dp" else 5 % 2
    assert f"replica {replica}, microbatch 5 is NaN or Inf" in curve.done.err, curve.done.explain()
    assert max(curve.losses) == 2


@pytest.mark.slow
def test_a_gradient_that_is_nan_once_costs_its_replica() -> None:
    curve = recover(4, TP2, iterations=5, inject=["nan:rank=3,iteration=3,phase=backward,microbatch=1"])
    assert_survived(curve, vanilla(2, TP2), iterations=5, lost=[1])
    assert "suspect its device" in curve.of("leave")[0]["reason"]


@pytest.mark.slow
def test_data_workers_are_killed() -> None:
    curve = recover(3, "--num-workers 2", iterations=40, script=str(HERE / "worker_program.py"))
    assert_same_curve(curve, vanilla(1, iterations=40))
    assert max(curve.losses) == 40
    assert curve.of("finish")[-1]["exit_code"] == 0


@pytest.mark.parametrize(
    "faults", [["kill:rank=0,iteration=4,phase=optimizer"], ["kill:rank=0,phase=exit", "pause:rank=1,phase=exit"]]
)
@pytest.mark.slow
def test_a_leader_that_is_lost_at_the_very_end_has_an_heir_who_says_so(faults: list[str]) -> None:
    """Otherwise the launcher would take the job for lost, and train it once more."""
    curve = recover(3, iterations=4, inject=faults, options=("--max-restarts", "0"))
    assert_same_curve(curve, vanilla(1))
    assert curve.of("finish")[-1]["exit_code"] == 0
