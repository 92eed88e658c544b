"""The launcher with a real mpirun and small programs in place of training scripts."""

from __future__ import annotations

import glob
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from harness import marked
from launching import LIMIT_S, PROGRAMS, Running, is_working, launch

from megatron_recover import cli, mpi_install
from megatron_recover.launch import Launch, command, environment, verdict
from megatron_recover.supervise import Outcome
from megatron_recover.telemetry.blackbox import Snapshot

RANKS = str(PROGRAMS / "ranks.py")


@pytest.mark.timeout(60)
def test_passes_on_output_and_ends_with_the_leaders_code(tmp_path: Path) -> None:
    done = launch(
        RANKS, "talk", "17", n=3, options=("--log-dir", str(tmp_path / "log"), "--mca", "pml", "ob1")
    )
    assert done.code == 17, done.explain()
    for rank in range(3):
        assert f"out of rank {rank}\n" in done.out
        assert f"err of rank {rank}\n" in done.err
    assert "err of" not in done.out
    assert "out of" not in done.err
    assert done.out.endswith("no newline at the end")
    assert done.err.splitlines()[-1] == (
        "megatron-recover: exit code 17 (the script's own): as the leader said"
    )
    assert (tmp_path / "log" / "stdout.log").read_text() == done.out
    assert (tmp_path / "log" / "stderr.log").read_text() == done.err
    variables = json.loads(re.search(r"ENV (\{.*?\})", done.out)[1])  # type: ignore[index]
    assert variables["OMPI_MCA_pml"] == "ob1"
    assert variables["OMPI_MCA_mpi_ft_enable"] == "1"
    assert not Path(variables["dir"]).exists()


@pytest.mark.timeout(60)
def test_done_says_nothing() -> None:
    done = launch(RANKS, "talk", "0")
    assert done.code == 0, done.explain()
    assert "megatron-recover:" not in done.err


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("how", "most"), [("ask", 2.0), ("stubborn", 3.0)])
def test_children_of_a_killed_rank_are_ended_while_the_job_runs(how: str, most: float) -> None:
    done = launch(RANKS, "orphan", how)
    assert done.code == 0, done.explain()
    gone = float(re.search(r"child gone after ([\d.]+) s", done.out)[1])  # type: ignore[index]
    assert gone < most
    assert done.err == "", "a killed rank is no noise in the log"


@pytest.mark.timeout(60)
def test_a_child_that_holds_stdout_does_not_keep_the_job(running: list[Running]) -> None:
    begin = time.monotonic()
    job = Running(RANKS, "orphan", "leave")
    running.append(job)
    code, _, err = job.end()
    assert code == 0, err
    assert time.monotonic() - begin < 10
    assert marked(job.mark) == []


@pytest.mark.timeout(60)
def test_nothing_is_left_of_a_job(running: list[Running]) -> None:
    job = Running(RANKS, "daemon")
    running.append(job)
    code, out, err = job.end()
    assert code == 0, err
    assert re.search(r"daemon \d+", out)
    assert marked(job.mark) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("kill", 71, "no replica left): every rank was lost, nothing could be saved; not started again: "),
        ("3", 1, "crashed): a rank ended the job (mpirun's exit code is 3)"),
        ("raise", 1, "ValueError: the script's own error"),
    ],
)
def test_jobs_that_end_without_a_leader(how: str, code: int, message: str) -> None:
    done = launch(RANKS, "die", how)
    assert done.code == code, done.explain()
    assert message in done.err
    assert done.err.splitlines()[-1].startswith(f"megatron-recover: exit code {code} (")


@pytest.mark.timeout(60)
def test_sigterm_lets_the_ranks_save(running: list[Running]) -> None:
    job = Running(RANKS, "wait", "save")
    running.append(job)
    job.wait_until_ready()
    job.process.send_signal(signal.SIGTERM)
    code, _, err = job.end()
    assert code == 0
    assert "SIGTERM received" in err


@pytest.mark.timeout(60)
def test_sigterm_ends_ranks_that_do_not_care(running: list[Running]) -> None:
    job = Running(RANKS, "wait")
    running.append(job)
    job.wait_until_ready()
    job.process.send_signal(signal.SIGTERM)
    code, _, err = job.end()
    assert code == 128 + signal.SIGTERM
    assert "exit code 143 (stopped by a signal): stopped by SIGTERM" in err.splitlines()[-1]


@pytest.mark.timeout(60)
def test_the_second_interrupt_ends_everything_at_once(running: list[Running]) -> None:
    job = Running(RANKS, "wait", "ignore")
    running.append(job)
    job.wait_until_ready()
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert job.process.poll() is None, "the first one only asks"
    assert len(marked(job.mark)) >= 4
    job.process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    code, _, err = job.end()
    assert code == 128 + signal.SIGINT
    assert "at once" in err
    assert time.monotonic() - begin < 6
    assert marked(job.mark) == []


@pytest.mark.timeout(60)
def test_timeout() -> None:
    done = launch(RANKS, "wait", options=("--timeout", "2"))
    assert done.code == 124, done.explain()
    assert "had not ended after --timeout 2 seconds" in done.err.splitlines()[-1]


@pytest.mark.timeout(60)
def test_nothing_is_left_by_a_launcher_that_is_killed(
    running: list[Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job = Running(RANKS, "wait")
    running.append(job)
    ranks = [psutil.Process(pid) for pid in job.wait_until_ready()]
    job.process.kill()
    job.process.communicate(timeout=LIMIT_S)
    deadline = time.monotonic() + 10
    while (alive := [rank for rank in ranks if is_working(rank)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive == []
    while any(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
def test_a_killed_mpirun_leaves_nothing(running: list[Running]) -> None:
    job = Running(RANKS, "wait", options=("--max-restarts", "0"))
    running.append(job)
    ranks = job.wait_until_ready()
    segments = {
        text.split()[-1]
        for pid in ranks
        for text in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "sm_segment" in text
    }
    mpirun = psutil.Process(ranks[0]).parent()
    assert mpirun is not None
    mpirun.kill()
    code, _, err = job.end()
    assert code == 73
    assert err.splitlines()[-1] == "megatron-recover: exit code 73 (gave up): mpirun was ended by SIGKILL."
    assert marked(job.mark) == []
    assert not any(os.path.exists(segment) for segment in segments)
    assert glob.glob(f"/tmp/ompi.{mpirun.pid}") == []


@pytest.mark.timeout(60)
def test_two_jobs_at_once(running: list[Running]) -> None:
    running += [Running(RANKS, "talk", "0"), Running(RANKS, "talk", "5")]
    ended = [job.end() for job in running]
    assert [code for code, _, _ in ended] == [0, 5], ended
    variables = [json.loads(re.search(r"ENV (\{.*?\})", out)[1]) for _, out, _ in ended]  # type: ignore[index]
    assert variables[0]["MEGATRON_RECOVER_JOB"] != variables[1]["MEGATRON_RECOVER_JOB"]
    assert variables[0]["dir"] != variables[1]["dir"]


BAD = {
    "no script": (["-n", "2"], [], "no script: put `--` and the training script after the options"),
    "missing script": (["-n", "2"], ["nowhere.py"], "there is no script 'nowhere.py'"),
    "no ranks": (["-n", "0"], ["S"], "-n 0 starts nothing"),
    "timeout": (["-n", "2", "--timeout", "-1"], ["S"], "--timeout -1"),
    "start timeout": (["-n", "2", "--start-timeout", "0"], ["S"], "--start-timeout 0 is no time"),
    "restarts": (["-n", "2", "--max-restarts", "-1"], ["S"], "--max-restarts -1 is too small"),
    "replica size": (
        ["-n", "6"],
        ["S", "--recover", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size=2"],
        "-n 6 is not a multiple of the replica size 4",
    ),
    "batch": (
        ["-n", "2"],
        ["S", "--recover", "--global-batch-size", "10", "--micro-batch-size", "4"],
        "--global-batch-size 10 is not a multiple of --micro-batch-size 4: use 8 or 12",
    ),
    "recover": (["-n", "2"], ["S", "--recover-policy", "balanced"], "--recover is missing"),
    "policy": (
        ["-n", "2"],
        ["S", "--recover", "--recover-policy", "fair"],
        "--recover-policy 'fair' is unknown",
    ),
    "fault": (
        ["-n", "2"],
        ["S", "--recover", "--recover-inject", "kill:rank=1"],
        "KIND:rank=R,iteration=I,phase=P",
    ),
    "fault rank": (
        ["-n", "2"],
        ["S", "--recover", "--recover-inject", "kill:rank=2,iteration=1,phase=save"],
        "there is no rank 2",
    ),
    "replicas": (
        ["-n", "2"],
        ["S", "--recover", "--recover-min-replicas", "3"],
        "--recover-min-replicas 3 is more than the 2 replicas",
    ),
    "data": (["-n", "2"], ["S", "--recover", "--data-path", "no/such"], "there is no file no/such.idx"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    options, script, message = BAD[case]
    words = [RANKS if word == "S" else word for word in script]
    assert cli.main(["launch", *options, *(["--", *words] if words else [])]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megatron-recover: error: ")
    assert message in error


@pytest.mark.timeout(60)
def test_options_that_mpirun_refuses() -> None:
    done = launch(RANKS, "talk", "0", options=("--no-such-option", "1"))
    assert done.code == 2, done.explain()
    assert "unrecognized option" in done.err
    assert "bad configuration): mpirun did not start the ranks" in done.err.splitlines()[-1]


def test_mpi_without_ulfm_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ompi_info = tmp_path / "ompi_info"
    ompi_info.write_text("#!/bin/sh\necho ompi:version:full:4.1.6\necho options:ft_mpi_support:no\n")
    ompi_info.chmod(0o755)
    monkeypatch.setattr(mpi_install, "find_mpirun", lambda: tmp_path / "mpirun")
    assert cli.main(["launch", "-n", "2", "--", RANKS]) == 2
    error = capsys.readouterr().err
    assert "Open MPI 4.1.6" in error
    assert "has no ULFM" in error
    assert "pip install" in error


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], "megatron-recover doctor"),
        (["launch"], "--recover-inject kill:rank=3"),
        (["doctor"], "megatron-recover doctor &&"),
        (["prepare-data"], "megatron-recover prepare-data --text"),
    ],
)
def test_help_teaches_with_an_example(
    words: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--help"])
    assert not end.value.code
    assert shown in capsys.readouterr().out


def status(code: int) -> dict[str, object]:
    return {"exit_code": code, "reason": "written"}


@pytest.mark.parametrize(
    ("outcome", "code", "reason"),
    [
        (Outcome(0, status(0), 2, None, False), 0, "written"),
        (Outcome(1, status(70), 2, None, False), 70, "written"),
        (Outcome(0, status(0), 2, signal.SIGTERM, False), 0, "written"),
        # one rank had failed, then the user stopped the rest
        (Outcome(0, status(1), 2, signal.SIGTERM, False), 143, "SIGTERM"),
        (Outcome(0, None, 2, signal.SIGINT, False), 130, "SIGINT"),
        (Outcome(0, None, 2, None, True), 124, "--timeout 5 "),
        (Outcome(0, None, 2, None, False), 71, "every rank was lost"),
        (Outcome(1, None, 2, None, False), 1, "a rank ended the job"),
        (Outcome(213, None, 0, None, False), 2, "mpirun did not start the ranks"),
        (Outcome(213, None, 0, None, False, has_heard=True), 1, "a rank ended the job"),
        (Outcome(70, None, 0, None, False, has_heard=True), 70, "a rank ended the job"),
        (Outcome(-9, None, 2, None, False), 73, "mpirun was ended by SIGKILL"),
        (Outcome(213, None, 2, None, False, is_managed=True), 73, "mpirun ended the job by itself"),
        (Outcome(143, None, 2, None, False, failed_start="rank 1 ended"), 73, "the start failed: rank 1 ended"),
        (Outcome(143, status(1), 2, None, False, failed_start="rank 1 ended"), 73, "rank 1 ended (written)"),
        (Outcome(143, status(2), 2, None, False, failed_start="rank 1 ended"), 2, "written"),
        (
            Outcome(0, None, 2, None, False, [Snapshot(1, 10, 5, "reduce", 1, 1.0, 1.0)]),
            71,
            "(last heard of: rank 1 iteration 5 reduce)",
        ),
    ],
)
def test_verdict(outcome: Outcome, code: int, reason: str) -> None:
    found = verdict(outcome, timeout_s=5)
    assert found[0] == code
    assert reason in found[1]


def test_command_gives_mpirun_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        monkeypatch.delenv(variable, raising=False)
    plain = command(Launch(4, "s.py", ("--x",)), Path("mpirun"))
    assert plain[plain.index("--bind-to") + 1] == "none"
    assert "--oversubscribe" in plain
    assert plain[-5:] == [sys.executable, "-m", "megatron_recover.run", "s.py", "--x"]
    own = ("--bind-to", "core", "--host", "a:2,b:2", "--with-ft", "ulfm")
    line = command(Launch(4, "s.py", mpirun_options=own), Path("mpirun"))
    assert line.count("--bind-to") == line.count("--with-ft") == 1
    assert "--oversubscribe" not in line, "named hosts have slots"
    assert " ".join(own) in " ".join(line)


def test_environment_is_not_that_of_an_outer_job() -> None:
    ours = environment(
        "id", Path("/x"), {"OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3", "OMPI_MCA_pml": "ucx", "A": "b"}
    )
    assert "OMPI_COMM_WORLD_RANK" not in ours
    assert "PMIX_RANK" not in ours
    assert ours["OMPI_MCA_pml"] == "ob1"
    assert ours["A"] == "b"
    assert ours["MEGATRON_RECOVER_JOB"] == "id"
