"""Layer 1 under a real mpirun, with real SIGKILLs at every place of its protocol."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import CORE, mpirun

TIMEOUT = 60


def run_engine(num_ranks: int, *, timeout: float = TIMEOUT, **job: Any) -> list[dict[str, Any]]:
    """Results of the ranks that came to the end; asserts that all of them computed the right sums."""
    whole = {"replica_size": 1, "iterations": 4, "microbatches": 7, "sizes": [10, 100_000, 3], "kills": []} | job
    done = mpirun(num_ranks, [str(CORE / "engine_program.py"), json.dumps(whole)], timeout=timeout)
    assert done.code == 0, done.explain()
    assert done.results, done.explain()
    for result in done.results:
        assert result["wrong"] == [], done.explain()
        for what in ("alive", "epoch", "rounds"):
            assert result[what] == done.results[0][what], done.explain()
    return done.results


def test_without_failures_one_round_an_iteration() -> None:
    results = run_engine(4)
    assert len(results) == 4
    assert {result["rounds"] for result in results} == {4}
    assert {result["epoch"] for result in results} == {0}


@pytest.mark.parametrize("where", ["start", "reduce", "exchange", "attempt", "idle"])
def test_one_rank_dies(where: str) -> None:
    results = run_engine(3, kills=[[1, 2, where, 1 if where == "reduce" else 0]])
    assert {result["rank"] for result in results} == {0, 2}
    assert results[0]["alive"] == [0, 2]
    assert results[0]["epoch"] == 1
    assert results[0]["rounds"] == 5
    assert all(result["lost"] == [[1]] for result in results)


def test_orphans_leave_and_coordinates_that_lost_nobody_learn_of_it() -> None:
    results = run_engine(6, replica_size=2, kills=[[3, 2, "reduce", 1]])
    assert {result["rank"] for result in results} == {0, 1, 4, 5}
    assert all(sorted(rank for lost in result["lost"] for rank in lost) == [2, 3] for result in results)


def test_a_rank_that_leaves_with_a_non_zero_code_ends_the_job_instead_of_hanging_it() -> None:
    """Open MPI does not report it, so it cannot be repaired; waiting for ever is not the answer."""
    job = {"replica_size": 1, "iterations": 4, "microbatches": 7, "sizes": [10], "kills": [[1, 2, "start", 0]]}
    done = mpirun(3, [str(CORE / "engine_program.py"), json.dumps(job | {"exit_code": 3})], timeout=TIMEOUT)
    assert done.code != 0, done.explain()
    assert "gave up: rank 1 has ended without MPI noticing" in done.err, done.explain()


def test_rank_0_dies() -> None:
    assert run_engine(3, kills=[[0, 1, "reduce", 0]])[0]["alive"] == [1, 2]


def test_two_die_in_the_same_reduction() -> None:
    assert run_engine(4, kills=[[1, 2, "reduce", 0], [2, 2, "reduce", 0]])[0]["alive"] == [0, 3]


def test_one_after_another_down_to_one() -> None:
    results = run_engine(4, kills=[[0, 1, "attempt", 0], [3, 1, "exchange", 0], [1, 3, "start", 0]])
    assert [result["rank"] for result in results] == [2]


def test_death_right_after_a_repair() -> None:
    results = run_engine(4, kills=[[1, 2, "reduce", 0], [2, 2, "repaired", 1]])
    assert results[0]["alive"] == [0, 3]


def test_fewer_microbatches_than_replicas() -> None:
    assert run_engine(4, microbatches=2, kills=[[0, 2, "reduce", 0]])[0]["alive"] == [1, 2, 3]


@pytest.mark.slow
def test_bucket_of_more_than_two_gigabytes() -> None:
    elements = (1 << 29) + 5  # 2^31 bytes and a little
    results = run_engine(
        2, iterations=1, microbatches=2, sizes=[elements], kills=[], timeout=240
    )
    assert len(results) == 2
