"""The launcher starts a job again when it must, and only then: real mpirun, small programs in place of training."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import cluster
import psutil
import pytest
from harness import Finished, marked, run
from launching import ENV, PROGRAMS, Running, is_working, launch, line

TRIES = str(PROGRAMS / "tries.py")
pytestmark = pytest.mark.timeout(120)


def tries(*words: str, n: int = 2, options: tuple[str, ...] = ()) -> Finished:
    """A job whose tries end as the words say (``programs/tries.py``)."""
    return launch(TRIES, *words, n=n, options=options, entry="kept_entry")


def begun(out: str) -> list[dict[str, Any]]:
    """What each try that got through the start has said of itself."""
    return [json.loads(row.removeprefix("TRY ")) for row in out.splitlines() if row.startswith("TRY ")]


def ours(err: str) -> list[str]:
    """What the launcher has said."""
    return [
        row.removeprefix("megatron-recover: ") for row in err.splitlines() if row.startswith("megatron-recover: ")
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


@pytest.mark.slow
def test_the_number_of_tries_is_bounded() -> None:
    done = tries("killed@1", "killed@2", "killed@3", options=("--max-restarts", "1"))
    assert done.code == 71, done.explain()
    assert len(begun(done.out)) == 2
    assert ours(done.err)[-1].endswith("not started again: --max-restarts is 1.")


@pytest.mark.parametrize(("word", "code"), [("too-few", 70), pytest.param("differ", 72, marks=pytest.mark.slow)])
def test_what_another_try_would_not_mend_is_not_started_again(word: str, code: int) -> None:
    done = tries(word, "done")
    assert done.code == code, done.explain()
    assert len(begun(done.out)) == 1
    assert ours(done.err) == [f"exit code {code} ({'too few replicas' if code == 70 else 'replicas differ'}): as told"]


def test_a_rank_that_is_lost_before_mpi_is_up() -> None:
    done = tries("die", "done", n=3)
    assert done.code == 0, done.explain()
    assert [one["try"] for one in begun(done.out)] == [2]
    (said,) = ours(done.err)
    assert "the start failed: rank 1 ended before MPI was up on all ranks, so the others could not start;" in said
    assert done.seconds < 30


@pytest.mark.slow
def test_the_error_of_one_rank_before_mpi_is_up_may_be_its_hosts() -> None:
    done = tries("error", "done")
    assert done.code == 0, done.explain()
    (said,) = ours(done.err)
    assert "so the others could not start (the error of one rank); starting again" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "what"), [("hang", "rank 1 has not come as far as loading MPI"), ("stop", "rank 1 is stopped (SIGSTOP)")]
)
def test_a_start_that_stands_still(word: str, what: str) -> None:
    done = tries(word, "done", n=3, options=("--start-timeout", "5"))
    assert done.code == 0, done.explain()
    assert [one["try"] for one in begun(done.out)] == [2]
    (said,) = ours(done.err)
    assert f"nothing has moved for --start-timeout 5 seconds while the ranks were starting: {what};" in said
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
    (said,) = ours(done.err)
    assert said.startswith("rank 1 (process ") and "and its keeper does nothing about it: both are killed" in said
    assert done.out.count("killed after") == 2


def test_nothing_is_left_of_workers_managers_and_a_stopped_rank(running: list[Running]) -> None:
    begin = time.monotonic()
    job = Running(TRIES, "leave-behind", n=4, entry="kept_entry")
    running.append(job)
    code, out, err = job.end()
    assert code == 0, err
    assert time.monotonic() - begin < 30
    assert out.count("beside rank") == 4
    assert "megatron_recover: rank 1 (process " in err and "it is stopped" in err, "its keeper has killed it"
    assert marked(job.mark) == []


@pytest.mark.slow
def test_a_job_that_is_frozen_as_a_whole_goes_on(running: list[Running]) -> None:
    """As a batch system suspends it: for longer than any lease."""
    job = Running(TRIES, "wait", entry="kept_entry")
    running.append(job)
    ranks = [psutil.Process(pid) for pid in job.wait_until_ready()]
    frozen = marked(job.mark)
    for process in frozen:
        process.suspend()
    time.sleep(8)  # what the test is about: the lease is 2 s
    for process in frozen:
        process.resume()
    gone, _ = psutil.wait_procs(ranks, timeout=6)
    assert gone == []
    job.process.terminate()
    code, _, err = job.end()
    assert code == 143, err
    assert "sign of life" not in err


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


@pytest.mark.slow
def test_a_lost_host_is_left_out(tmp_path: Path) -> None:
    """Nodes are namespaces (tests/cluster.py); the one of rank 1 is switched off."""
    done = on_two_nodes(tmp_path, "node1:2,node2:2", "host-lost@1", "done")
    assert done.code == 0, done.explain()
    first, second = begun(done.out)
    assert (first["ranks"], second["ranks"]) == (4, 2)
    assert second["left"] == 0, "the ranks of the first try have left the other node too"
    assert (
        "megatron-recover: try 1 ended with exit code 73 (gave up): mpirun ended the job: host node1 does not answer; "
        "starting again (try 2 of at most 4) with 2 of 4 ranks, with the same arguments" in done.err
    )


@pytest.mark.slow
def test_a_host_that_was_never_there_is_a_mistake(tmp_path: Path) -> None:
    done = on_two_nodes(tmp_path, "node1:2,node3:2", "done")
    assert done.code == 2, done.explain()
    assert "exit code 2 (bad configuration): host node3 does not answer" in done.err


def on_two_nodes(folder: Path, nodes: str, *words: str) -> Finished:
    """A job of four ranks, started from a third node."""
    if (reason := cluster.why_not()) is not None:
        pytest.skip(reason)
    options = ("--host", nodes, "-x", "PYTHONPATH", "--mca", "plm_rsh_agent", cluster.agent())
    command = line(TRIES, *words, n=4, entry="kept_entry", options=options)
    env = {"PYTHONPATH": f"{ENV['PYTHONPATH']}:{Path(cluster.__file__).parent}"}
    return run(cluster.on_a_cluster(folder / "cluster", 2, command), timeout=100, env=env)
