"""What a real run also uses: layouts beyond the matrix, dropout, evaluation, loggers, checkpoints."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_runs import assert_same_curve, assert_survived, recover, vanilla

from megatron_recover.errors import ExitCode

PP2 = "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2"
MOE = (
    f"{TP2} --sequence-parallel --num-experts 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
    "--moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --disable-bias-linear "
    "--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type seq_aux_loss"
)


def test_interleaved_pipeline_takes_shares_that_its_schedule_does_not() -> None:
    """8 microbatches over 3 replicas, then over 2: shares of 3 and 2 and a takeover of 1 are padded."""
    flags = f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --overlap-grad-reduce"
    curve = recover(6, flags, iterations=6, inject=["kill:rank=0,iteration=3,phase=backward,microbatch=1"])
    assert_survived(curve, vanilla(2, flags), iterations=6, lost=[0])


def test_mixture_of_experts_with_expert_bias_inside_the_replica() -> None:
    curve = recover(4, MOE, iterations=6, inject=["kill:rank=3,iteration=3,phase=backward,microbatch=1"])
    reference = vanilla(2, MOE)
    assert_survived(curve, reference, iterations=6, lost=[1])
    # The logged load-balancing loss is a sum over all microbatches too.
    assert _logged(curve.done.out, "seq_load_balancing_loss") == pytest.approx(
        _logged(reference.done.out, "seq_load_balancing_loss")[:6], rel=1e-4
    )


def test_dropout_is_the_same_wherever_a_microbatch_runs() -> None:
    """And data workers read ahead along a plan that a failure changes; evaluation survives one, too."""
    flags = "--attention-dropout 0.1 --hidden-dropout 0.1 --num-workers 2 --eval-iters 2 --eval-interval 3"
    whole = recover(2, flags, iterations=6)
    kills = ["kill:rank=0,iteration=2,phase=backward,microbatch=1", "kill:rank=2,iteration=3,phase=eval,microbatch=1"]
    curve = recover(3, flags, iterations=6, inject=kills)
    assert_survived(curve, whole, iterations=6, lost=[0, 2])
    assert whole.validation == pytest.approx(curve.validation, rel=1e-6)
    assert len(whole.validation) == 3


@pytest.mark.slow
def test_fewer_microbatches_than_replicas() -> None:
    flags = "--global-batch-size 4"
    curve = recover(3, flags, iterations=5, inject=["kill:rank=1,iteration=3,phase=backward,microbatch=0"])
    assert_survived(curve, vanilla(1, flags), iterations=5, lost=[1])


def test_loggers_go_on_with_the_next_leader(tmp_path: Path) -> None:
    """The leader dies between commit and log line: no point and no line is missing, and wandb keeps its run."""
    flags = f"--tensorboard-dir {tmp_path / 'board'} --tensorboard-log-interval 1 "
    flags += f"--wandb-project recover --wandb-exp-name test --wandb-save-dir {tmp_path}"
    kills = ["kill:rank=0,iteration=3,phase=optimizer"]
    curve = recover(2, flags, iterations=5, inject=kills, env={"WANDB_MODE": "offline"})
    assert_survived(curve, vanilla(1), iterations=5, lost=[0])

    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    steps = {name: sorted({point.step for point in board.Scalars(name)}) for name in board.Tags()["scalars"]}
    assert steps["lm loss"] == [1, 2, 3, 4, 5]
    replicas = {point.step: point.value for point in board.Scalars("recover/alive_replicas")}
    assert (replicas[2], replicas[5]) == (2, 1)
    redone = {point.step: point.value for point in board.Scalars("recover/redone_microbatches")}
    assert redone[4] == 4
    for name in ("epoch", "repair(ms)", "tokens_per_second", "tokens_per_second_per_living_rank"):
        assert steps[f"recover/{name}"][-1] == 5

    runs = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 2  # one directory a process, of one run
    assert len({name.rsplit("-", 1)[1] for name in runs}) == 1


def test_checkpoints_are_ordinary_and_load_on_any_number_of_replicas(tmp_path: Path) -> None:
    """Saved by 3 replicas (the leader dies in the middle of the save), loaded by 2, and by vanilla."""
    save = f"--save {tmp_path} --save-interval 4 --exit-interval 4"
    first = recover(3, save, iterations=8, inject=["kill:rank=0,iteration=4,phase=save"])
    assert_survived(first, vanilla(1), iterations=4, lost=[0])
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    load = f"--load {tmp_path}"
    for resumed in (recover(2, load, iterations=8), vanilla(2, load, iterations=8)):
        assert sorted(resumed.losses) == [5, 6, 7, 8]
        del resumed.losses[6]  # Megatron logs the mean of the first two losses there
        assert_same_curve(resumed, vanilla(1))


@pytest.mark.parametrize("kind", ["overlap", "no-overlap"])
@pytest.mark.slow
def test_bfloat16_gradient_buckets(kind: str) -> None:
    flags = "--bf16 --grad-reduce-in-bf16" + (" --overlap-grad-reduce" if kind == "overlap" else "")
    curve = recover(3, flags, iterations=5, inject=["kill:rank=1,iteration=3,phase=reduce,bucket=0"])
    whole = recover(3, flags, iterations=5)
    assert_same_curve(curve, whole, relative=2e-3)


@pytest.mark.slow
def test_sequence_parallel() -> None:
    flags = f"{TP2} --sequence-parallel --overlap-grad-reduce"
    curve = recover(4, flags, iterations=5, inject=["kill:rank=2,iteration=3,phase=reduce,bucket=1"])
    assert_survived(curve, vanilla(2, flags), iterations=5, lost=[1])


@pytest.mark.slow
def test_distributed_optimizer_inside_the_replica() -> None:
    flags = "--use-distributed-optimizer --overlap-grad-reduce"
    curve = recover(3, flags, iterations=5, inject=["kill:rank=0,iteration=3,phase=reduce,bucket=1"])
    assert_survived(curve, vanilla(1, flags), iterations=5, lost=[0])


@pytest.mark.parametrize("flags", ["", "--use-distributed-optimizer"])
@pytest.mark.slow
def test_two_shards_in_each_replica(flags: str) -> None:
    curve = recover(
        4, f"--recover-shards 2 {flags}", iterations=5, inject=["kill:rank=3,iteration=3,phase=backward,microbatch=1"]
    )
    assert_survived(curve, vanilla(2, flags), iterations=5, lost=[1])


@pytest.mark.slow
def test_per_token_loss() -> None:
    flags = "--calculate-per-token-loss"
    curve = recover(3, flags, iterations=5, inject=["kill:rank=0,iteration=3,phase=forward,microbatch=1"])
    assert_survived(curve, vanilla(1, flags), iterations=5, lost=[0])


def test_a_signal_to_one_rank_ends_all_replicas_in_the_same_iteration(tmp_path: Path) -> None:
    flags = f"--exit-signal-handler --save {tmp_path} --save-interval 1000"
    script = str(Path(__file__).with_name("signal_program.py"))
    curve = recover(2, flags, iterations=300, script=script, code=ExitCode.SAVED_ON_SIGNAL)
    last = max(curve.losses)
    assert 3 <= last < 300
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(last)
    assert curve.of("finish")[-1]["exit_code"] == ExitCode.SAVED_ON_SIGNAL
    assert not curve.of("failure")


@pytest.mark.slow
def test_a_time_limit_ends_all_replicas_in_the_same_iteration(tmp_path: Path) -> None:
    flags = f"--exit-duration-in-mins 1 --save {tmp_path} --save-interval 100000"
    curve = recover(2, flags, iterations=20000)
    last = max(curve.losses)
    assert last < 20000
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(last)
    assert not curve.of("failure")


def test_gradients_are_reduced_while_backward_still_runs() -> None:
    script = str(Path(__file__).with_name("overlap_program.py"))
    curve = recover(2, "--overlap-grad-reduce", iterations=3, script=script)
    first, *others = (result for result in curve.done.results if result["rank"] == 0)
    # Megatron learns in the first iteration in which order gradients get ready, and overlaps from the second one on.
    assert first["early"] == 0
    assert len(others) == 2
    assert all(result["early"] == result["buckets"] > 1 for result in others)


@pytest.mark.slow
def test_two_jobs_that_were_given_the_same_port(tmp_path: Path) -> None:
    """Every replica takes a port of its own, so MASTER_PORT from the environment cannot collide."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(recover, 2, TP2, iterations=3, env={"MASTER_PORT": "29500"}) for _ in range(2)]
        first, second = (job.result() for job in jobs)
    assert first.losses == second.losses
    assert len(first.losses) == 3


def test_what_is_not_supported_is_refused_with_its_flag(tmp_path: Path) -> None:
    done = recover(2, "--dataloader-type cyclic", iterations=2, code=2).done
    assert "--dataloader-type cyclic" in done.err
    assert done.err.count("cannot be used with --recover") <= 2, done.err


def _logged(out: str, name: str) -> list[float]:
    """Values of a number in Megatron's iteration lines."""
    found = []
    for line in out.splitlines():
        if " iteration " in line and f"{name}: " in line:
            found.append(float(line.split(f"{name}: ")[1].split()[0]))
    assert found, json.dumps(out[-2000:])
    return found
