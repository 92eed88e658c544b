"""The launcher starts a job again when it must, and only then: real mpirun, small programs in place of training."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import psutil
import pytest
from harness import Finished, marked
from launching import PROGRAMS, Running, is_working, launch

TRIES = str(PROGRAMS / "tries.py")
pytestmark = pytest.mark.timeout(120)


def tries(*words: str, n: int = 2, options: tuple[str, ...] = ()) -> Finished:
    """A job whose tries end as the words say (``programs/tries.py``)."""
    return launch(TRIES, *words, n=n, options=options, entry="kept_entry")


def begun(out: str) -> list[dict[str, Any]]:
    """What each try that got through the start has said of itself."""
    return [json.loads(line.removeprefix("TRY ")) for line in out.splitlines() if line.startswith("TRY ")]


def ours(err: str) -> list[str]:
    """What the launcher has said."""
    return [
        line.removeprefix("megatron-recover: ") for line in err.splitlines() if line.startswith("megatron-recover: ")
    ]


def test_starts_again_on_the_replicas_that_are_left() -> None:
    done = tries("lost-one@1", "lost-one@2", "done", n=3)
    assert done.code == 0, done.explain()
    seen = begun(done.out)
    assert [(one["try"], one["ranks"]) for one in seen] == [(1, 3), (2, 2), (3, 1)]
    assert len({one["job"] for one in seen}) == 1, "all tries are one job, for wandb too"
    assert [one["left"] for one in seen] == [0, 0, 0]
    assert len({one["dir"] for one in seen}) == 3, "what a try left behind does not confuse the next one"
    assert ours(done.err) == [
        "try 1 ended with exit code 73 (gave up): as told; starting again (try 2 of at most 4) with 2 of 3 ranks, "
        "with the same arguments",
        "try 2 ended with exit code 73 (gave up): as told; starting again (try 3 of at most 4) with 1 of 3 ranks, "
        "with the same arguments",
    ]


def test_a_job_that_makes_no_progress_is_not_started_again() -> None:
    done = tries("gave-up@5")
    assert done.code == 73, done.explain()
    assert len(begun(done.out)) == 2
    assert ours(done.err)[-1] == (
        "exit code 73 (gave up): a repair did not end; not started again: it came no further than the try before "
        "(ended in iteration 5, the one before in iteration 5)."
    )


def test_the_number_of_tries_is_bounded() -> None:
    done = tries("killed@1", "killed@2", "killed@3", options=("--max-restarts", "1"))
    assert done.code == 71, done.explain()
    assert len(begun(done.out)) == 2
    assert ours(done.err)[-1].endswith("not started again: --max-restarts is 1.")


@pytest.mark.parametrize(("word", "code"), [("too-few", 70), ("differ", 72)])
def test_what_another_try_would_not_mend_is_not_started_again(word: str, code: int) -> None:
    done = tries(word, "done")
    assert done.code == code, done.explain()
    assert len(begun(done.out)) == 1
    assert ours(done.err) == [f"exit code {code} ({'too few replicas' if code == 70 else 'replicas differ'}): as told"]


def test_a_rank_that_is_lost_before_mpi_is_up() -> None:
    done = tries("die", "done", n=3)
    assert done.code == 0, done.explain()
    assert [one["try"] for one in begun(done.out)] == [2]
    (line,) = ours(done.err)
    assert "the start failed: rank 1 ended before MPI was up on all ranks, so the others could not start;" in line
    assert done.seconds < 30


def test_the_error_of_a_rank_before_mpi_is_up_is_an_error() -> None:
    done = tries("error", "done")
    assert done.code == 1, done.explain()
    assert ours(done.err) == ["exit code 1 (crashed): the error of one rank"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "what"), [("hang", "rank 1 has not come as far as loading MPI"), ("stop", "rank 1 is stopped (SIGSTOP)")]
)
def test_a_start_that_stands_still(word: str, what: str) -> None:
    done = tries(word, "done", n=3, options=("--start-timeout", "5"))
    assert done.code == 0, done.explain()
    assert [one["try"] for one in begun(done.out)] == [2]
    (line,) = ours(done.err)
    assert f"nothing has moved for --start-timeout 5 seconds while the ranks were starting: {what};" in line
    assert 'tries.py", line' in done.err, "the stacks of the ranks show where the start stands"


@pytest.mark.slow
def test_a_start_that_fails_twice_is_given_up() -> None:
    done = tries("die")
    assert done.code == 73, done.explain()
    assert len(ours(done.err)) == 2
    assert ours(done.err)[-1].endswith("the try before it did not get through the start either.")


@pytest.mark.slow
def test_an_error_that_all_ranks_meet_before_mpi_is_up() -> None:
    done = tries("all-fail", "done", n=3)
    assert done.code == 1, done.explain()
    assert ours(done.err) == ["exit code 1 (crashed): the error of all ranks"]


def test_a_rank_that_is_stopped_with_its_keeper_is_killed() -> None:
    done = tries("freeze", n=3)
    assert done.code == 0, done.explain()
    (line,) = ours(done.err)
    assert line.startswith("rank 1 (process ") and "and its keeper does nothing about it: both are killed" in line
    assert done.out.count("killed after") == 2


def test_mpirun_is_killed(running: list[Running]) -> None:
    job = Running(TRIES, "wait@1", "done", entry="kept_entry")
    running.append(job)
    rank = psutil.Process(job.wait_until_ready()[0])
    mpirun = rank.parents()[1]
    mpirun.kill()
    code, out, err = job.end()
    assert code == 0, err
    assert [one["try"] for one in begun(out)] == [2], "the line of the first was read above"
    assert ours(err) == [
        "try 1 ended with exit code 73 (gave up): mpirun was ended by SIGKILL (last heard of: rank 0 iteration 1 "
        "forward, rank 1 iteration 1 forward); starting again (try 2 of at most 4) with 2 ranks, with the same "
        "arguments"
    ]
    assert marked(job.mark) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["signals", "timeout"])
def test_a_stopped_mpirun_keeps_nobody(running: list[Running], how: str) -> None:
    options = ("--timeout", "12") if how == "timeout" else ()
    job = Running(TRIES, "wait", entry="kept_entry", options=options)
    running.append(job)
    ranks = [psutil.Process(pid) for pid in job.wait_until_ready()]
    mpirun = ranks[0].parents()[1]
    mpirun.suspend()
    try:
        if how == "signals":
            job.process.send_signal(signal.SIGINT)
            psutil.wait_procs(ranks, timeout=20)
            job.process.send_signal(signal.SIGINT)
        code, _, err = job.end()
    finally:
        if is_working(mpirun):
            mpirun.kill()
    assert code == (124 if how == "timeout" else 130), err
    if how == "timeout":
        assert "mpirun is stopped (SIGSTOP)" in err
    assert not any(is_working(process) for process in [*ranks, mpirun])


def test_a_signal_ends_the_tries(running: list[Running]) -> None:
    job = Running(TRIES, "wait@1", entry="kept_entry")
    running.append(job)
    job.wait_until_ready()
    begin = time.monotonic()
    job.process.terminate()
    code, _, err = job.end()
    assert code == 143, err
    assert ours(err)[-1].startswith("exit code 143 (stopped by a signal): stopped by SIGTERM")
    assert time.monotonic() - begin < 15
    assert marked(job.mark) == []
