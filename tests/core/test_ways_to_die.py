"""Whoever dies, however: each kind of end is survived on the failure-free curve, under the real launcher or mpirun."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from harness import CORE, Finished, run
from test_session import assert_on_the_failure_free_curve, run_session, start

from megatron_recover.errors import ExitCode

SHORT = {"heartbeat_timeout_s": 2.0, "progress_timeout_s": 3.0}


def launch(num_ranks: int, *, max_restarts: int = 3, **job: Any) -> Finished:
    """The small trainer under our launcher."""
    command = [sys.executable, "-m", "megatron_recover.cli", "launch", "-n", str(num_ranks)]
    command += ["--max-restarts", str(max_restarts), "--", str(CORE / "session_program.py"), json.dumps(job)]
    return run(command, timeout=120)


def test_ends_that_mpi_would_not_notice_or_that_come_from_below() -> None:
    """A non-zero exit code (the others would wait for it for ever), a segmentation fault, no memory left."""
    faults = [
        "crash:rank=0,iteration=2,phase=backward,microbatch=0",
        "segfault:rank=1,iteration=3,phase=reduce,bucket=1",
        "oom:rank=2,iteration=4,phase=forward,microbatch=0",
        "exit:rank=3,iteration=5,phase=commit",
    ]
    results = run_session(5, inject=faults)
    assert results[0]["alive"] == [4]
    assert_on_the_failure_free_curve(results)


def test_processes_that_live_but_do_nothing() -> None:
    """Stopped, holding Python's lock, in an endless loop; a pause that is shorter than the timeout is no failure."""
    faults = [
        "stop:rank=0,iteration=2,phase=reduce,bucket=0",
        "gil:rank=1,iteration=3,phase=forward,microbatch=0",
        "hang:rank=2,iteration=4,phase=backward,microbatch=0",
        "pause:rank=3,iteration=5,phase=forward,microbatch=0",
    ]
    done = start(4, inject=faults, options=SHORT)
    assert done.code == 0, done.explain()
    assert done.results[0]["alive"] == [3]
    assert_on_the_failure_free_curve(done.results)
    assert "rank 0 (process" in done.err
    assert "it is stopped" in done.err
    assert "one call holds Python's lock" in done.err
    assert "has made no progress for" in done.err
    # Which call it was: the stack of the training thread, although the lock was never given back.
    assert done.err.count("in _end") >= 2, done.explain()


@pytest.mark.slow
def test_orphans_that_are_stuck_leave_when_a_member_is_stopped() -> None:
    results = run_session(6, replica_size=2, inject=["stop:rank=3,iteration=3,phase=commit"], options=SHORT)
    assert results[0]["alive"] == [0, 2]
    assert_on_the_failure_free_curve(results)


def test_a_replica_that_is_sent_sigterm_ends_its_iteration_and_leaves() -> None:
    """Nothing of it has to be redone; the leader among them."""
    faults = ["term:rank=0,iteration=2,phase=forward,microbatch=1", "term:rank=5,iteration=3,phase=commit"]
    results = run_session(6, replica_size=2, inject=faults)
    assert results[0]["alive"] == [1]
    assert results[0]["redone"] == 0
    assert results[0]["left"] == [0, 2]
    assert_on_the_failure_free_curve(results)


@pytest.mark.slow
def test_when_all_replicas_are_sent_sigterm_all_end_together() -> None:
    faults = [f"term:rank={rank},iteration=3,phase=forward,microbatch=0" for rank in range(2)]
    done = start(2, inject=faults)
    assert done.code == 128 + 15, done.explain()
    assert "every replica was sent SIGTERM, the last iteration is 3" in done.err


def test_when_the_whole_job_is_to_stop_one_signal_is_enough() -> None:
    """The launcher reaches the ranks of its own host only; the others leave after the same iteration."""
    done = start(3, inject=["term:rank=1,iteration=3,phase=forward,microbatch=0"], whole_job=True)
    assert done.code == 128 + 15, done.explain()
    assert "the job was asked to stop, the last iteration is 3" in done.err


def test_the_odd_one_out_of_three_is_dropped() -> None:
    results = run_session(3, inject=["corrupt:rank=1,iteration=3,phase=after-commit"])
    assert results[0]["alive"] == [0, 2]
    assert_on_the_failure_free_curve(results)


@pytest.mark.slow
def test_of_two_that_differ_nobody_knows_which_is_right() -> None:
    done = start(2, inject=["corrupt:rank=1,iteration=3,phase=after-commit"])
    assert done.code == ExitCode.REPLICAS_DIFFER, done.explain()
    assert "different state" in done.err


def test_a_gradient_that_is_nan_again_is_named_with_its_microbatch() -> None:
    done = start(3, poison=[[3, 4]])
    assert done.code == ExitCode.NOT_FINITE, done.explain()
    assert "the gradient of replica 1, rank 1 is NaN or Inf (parameter 0, parameter 1" in done.err, done.explain()
    assert "iteration 3: the gradient of replica 1, microbatch 4 is NaN or Inf" in done.err


def test_a_gradient_that_is_nan_once_costs_its_replica() -> None:
    done = start(3, inject=["nan:rank=2,iteration=3,phase=backward,microbatch=0"])
    assert done.code == 0, done.explain()
    assert "finite when computed again: suspect its device" in done.err
    assert done.results[0]["alive"] == [0, 1]
    assert_on_the_failure_free_curve(done.results)


def test_a_script_error_of_one_replica_does_not_speak_for_a_job_that_is_lost_later() -> None:
    """Replica 0 fails in iteration 2, and goes on without it; when all others are killed that is another thing."""
    faults = ["exception:rank=0,iteration=2,phase=forward,microbatch=0"]
    faults += [f"kill:rank={rank},iteration=4,phase=commit" for rank in (1, 2)]
    done = launch(3, inject=faults, options={}, max_restarts=0)
    assert done.code == ExitCode.NO_REPLICA_LEFT, done.explain()


def test_an_error_on_the_engine_thread_while_others_are_in_the_same_reduction() -> None:
    """Its rank must leave at once: what follows in its queue can not be carried out while the others wait in there."""
    faults = ["exception:rank=0,iteration=1,phase=reduce,bucket=0", "oom:rank=3,iteration=3,phase=reduce,bucket=1"]
    done = launch(4, inject=faults, max_restarts=0, overlap=True)
    assert done.code == 0, done.explain()
    assert done.results[0]["alive"] == [1, 2]
    assert "has not ended for" not in done.err, done.explain()
    assert_on_the_failure_free_curve(done.results)


@pytest.mark.slow
def test_a_repair_that_has_to_wait_for_a_stopped_rank_is_no_reason_to_give_up() -> None:
    """MPI knows of the dead rank at once; the repair is over when the other one has been found and killed."""
    faults = [f"{kind}:rank={rank},iteration=3,phase=forward,microbatch=0" for rank, kind in ((2, "kill"), (1, "stop"))]
    done = launch(4, inject=faults, max_restarts=0, options={"heartbeat_timeout_s": 8.0})
    assert done.code == 0, done.explain()
    assert done.results[0]["alive"] == [0, 3]
    assert_on_the_failure_free_curve(done.results)


def test_a_replica_that_dies_while_its_nan_is_looked_for_takes_nobody_with_it() -> None:
    """Failing devices do that. Its three microbatches are run again, one at a time; it dies in the first of them."""
    faults = ["nan:rank=3,iteration=3,phase=backward,microbatch=0"]
    faults += ["kill:rank=2,iteration=3,phase=forward,microbatch=3"]
    done = launch(4, inject=faults, max_restarts=0, replica_size=2)
    assert done.code == 0, done.explain()
    assert done.results[0]["alive"] == [0]
    assert_on_the_failure_free_curve(done.results)
