"""Layers 1 to 3 together on a tiny PyTorch model, under mpirun, with kills; Megatron is not imported."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from harness import CORE, REPOSITORY, Finished, mpirun

from megatron_recover.errors import ExitCode


def start(num_ranks: int, **job: Any) -> Finished:
    program = ["-m", "megatron_recover.run", str(CORE / "session_program.py"), json.dumps(job)]
    return mpirun(num_ranks, program, timeout=90)


def run_session(num_ranks: int, **job: Any) -> list[dict[str, Any]]:
    """Results of the survivors, which must be equal to each other to the last bit."""
    done = start(num_ranks, **job)
    assert done.code == 0, done.explain()
    assert done.results, done.explain()
    for result in done.results:
        for what in ("losses", "parameters", "alive", "redone"):
            assert result[what] == done.results[0][what], done.explain()
    return done.results


@functools.cache
def failure_free(dtype: str = "float32") -> list[list[float]]:
    losses: list[list[float]] = run_session(1, dtype=dtype)[0]["losses"]
    return losses


def assert_on_the_failure_free_curve(results: list[dict[str, Any]], dtype: str = "float32") -> None:
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for ours, theirs in zip(results[0]["losses"], failure_free(dtype), strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)


@pytest.mark.parametrize(("policy", "overlap"), [("balanced", False), ("recover", True)])
def test_replicas_follow_one_replica(policy: str, overlap: bool) -> None:
    assert_on_the_failure_free_curve(run_session(3, policy=policy, overlap=overlap))


@pytest.mark.parametrize(
    "places",
    [
        ("phase=forward,microbatch=1", "phase=commit", "phase=optimizer"),
        ("phase=backward,microbatch=0", "phase=reduce,bucket=2", "phase=after-commit"),
    ],
)
def test_killed_in_every_phase(places: tuple[str, ...]) -> None:
    """Three of four replicas are lost one after another, the leader each time."""
    kills = [f"kill:rank={n},iteration={2 * n + 1},{place}" for n, place in enumerate(places)]
    results = run_session(4, inject=kills, overlap=True)
    assert results[0]["alive"] == [3]
    assert results[0]["leader"] == 3
    assert_on_the_failure_free_curve(results)


@pytest.mark.parametrize("kind", ["exit", "exception"])
@pytest.mark.slow
def test_other_ways_to_die(kind: str) -> None:
    results = run_session(3, inject=[f"{kind}:rank=2,iteration=2,phase=backward,microbatch=1"])
    assert results[0]["alive"] == [0, 1]
    assert_on_the_failure_free_curve(results)


def test_paper_roles_down_to_one() -> None:
    kills = ["kill:rank=1,iteration=2,phase=reduce,bucket=0", "kill:rank=3,iteration=2,phase=commit"]
    kills.append("kill:rank=0,iteration=5,phase=forward,microbatch=0")
    results = run_session(4, policy="recover", inject=kills)
    assert results[0]["alive"] == [2]
    assert_on_the_failure_free_curve(results)


def test_replicas_of_two_ranks() -> None:
    results = run_session(6, replica_size=2, inject=["kill:rank=2,iteration=3,phase=reduce,bucket=1"])
    assert results[0]["alive"] == [0, 2]
    assert len(results) == 4
    assert_on_the_failure_free_curve(results)


def test_fewer_microbatches_than_replicas() -> None:
    results = run_session(4, microbatches=2, inject=["kill:rank=1,iteration=2,phase=reduce,bucket=0"])
    assert results[0]["alive"] == [0, 2, 3]
    assert results[0]["redone"] == 1


def test_bfloat16_gradients() -> None:
    results = run_session(3, dtype="bfloat16", inject=["kill:rank=1,iteration=3,phase=reduce,bucket=1"])
    assert_on_the_failure_free_curve(results, "bfloat16")


def test_below_the_minimum_all_leave_with_its_exit_code() -> None:
    done = start(3, min_replicas=3, inject=["kill:rank=1,iteration=3,phase=forward,microbatch=0"])
    assert done.code == ExitCode.TOO_FEW_REPLICAS, done.explain()
    assert "2 of 3 replicas are left, fewer than --recover-min-replicas 3" in done.err


@pytest.mark.parametrize(
    ("num_ranks", "wrong", "message"), [(3, "forget 1 2", "different plan"), (2, "drift 1 2", "different state")]
)
def test_what_must_never_happen_stops_the_job(num_ranks: int, wrong: str, message: str) -> None:
    done = start(num_ranks, wrong=wrong)
    assert done.code == ExitCode.REPLICAS_DIFFER, done.explain()
    assert message in done.err


def test_the_core_does_not_import_megatron() -> None:
    package = REPOSITORY / "megatron_recover"
    core = [package / "session.py"]
    for layer in ("collectives", "recovery", "workload", "telemetry"):
        core += (package / layer).glob("*.py")
    for path in core:
        for line in path.read_text().splitlines():
            assert not line.lstrip().startswith(("import megatron.", "from megatron.", "from megatron ")), path
