"""The last resort with the real Megatron: the launcher starts the job again, which goes on from its checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import cluster
import pytest
from harness import REPOSITORY, run
from training_runs import MODEL, TIMEOUT, Curve, assert_same_curve, data_flags, read_curve, recover, vanilla

SCRIPT = str(Path(__file__).with_name("last_resort_program.py"))


def restarts(curve: Curve) -> list[str]:
    return [line for line in curve.done.err.splitlines() if "; starting again (try " in line]


@pytest.mark.slow
def test_a_job_that_gave_up_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    flags = f"--save {tmp_path} --save-interval 2 --finetune"  # --finetune is about the first start only
    env = {"RECOVER_TEST_LAST": "give-up", "RECOVER_TEST_RANK": "1", "PYTHONPATH": _path()}
    curve = recover(2, flags, iterations=8, script=SCRIPT, env=env)
    (line,) = restarts(curve)
    assert "exit code 73 (gave up): told to give up; " in line
    assert f"with 2 ranks, from the checkpoint of iteration 4 in {tmp_path}" in line
    assert sorted(curve.losses) == list(range(1, 9)), curve.done.explain()
    del curve.losses[6]  # Megatron logs the mean of the first two losses of a resumed run there
    assert_same_curve(curve, vanilla(1))
    assert [event["event"] for event in curve.events].count("start") == 2, "both tries are in one event log"
    assert curve.of("finish")[-1]["exit_code"] == 0


@pytest.mark.slow
def test_a_rank_that_is_lost_before_mpi_is_up() -> None:
    curve = recover(2, iterations=3, inject=["kill:rank=1,phase=launch"])
    (line,) = restarts(curve)
    assert "the start failed: rank 1 ended before MPI was up on all ranks" in line
    assert "with 2 ranks, from the beginning (--save is not set)" in line
    assert_same_curve(curve, vanilla(1))


@pytest.mark.slow
def test_a_lost_host_is_left_out(tmp_path: Path) -> None:
    """Two hosts of three ranks, replicas of two: one replica lies across both. One host is left with one replica."""
    if (reason := cluster.why_not()) is not None:
        pytest.skip(reason)
    save = tmp_path / "save"
    options = ["--host", "node1:3,node2:3", "--mca", "plm_rsh_agent", cluster.agent()]
    for name in ("PYTHONPATH", "RECOVER_TEST_LAST", "RECOVER_TEST_RANK"):
        options += ["-x", name]
    flags = f"--tensor-model-parallel-size 2 --save {save} --save-interval 2 --train-iters 8 --recover"
    line = [sys.executable, "-m", "megatron_recover.cli", "launch", "-n", "6", *options, "--", SCRIPT]
    line += [*MODEL.split(), *data_flags(), *flags.split()]
    env = {"RECOVER_TEST_LAST": "power-off", "RECOVER_TEST_RANK": "4", "PYTHONPATH": _path()}
    done = run(cluster.on_a_cluster(tmp_path / "cluster", 2, line), timeout=TIMEOUT, env=env)
    assert done.code == 0, done.explain()
    curve = read_curve(done)
    (said,) = restarts(curve)
    assert "mpirun ended the job: host node2 does not answer; starting again" in said
    assert f"with 2 of 6 ranks, from the checkpoint of iteration 4 in {save}" in said
    assert sorted(curve.losses) == list(range(1, 9)), done.explain()
    del curve.losses[6]
    assert_same_curve(curve, vanilla(2, "--tensor-model-parallel-size 2"))


def _path() -> str:
    """For programs on nodes and in ranks: the package, and tests/cluster.py."""
    return os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
