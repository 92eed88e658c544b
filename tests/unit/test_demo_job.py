"""The demo's driver: a child job is logged, limited in time, never left behind; the verdict is strict."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from job import run_job
from megatron_recover.errors import UserError
from prepare import DemoData
from pretrain import Plan, default_injections, launch_command, main, verdict
from run_log import Failure, Point, Run


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie that nobody reaps here counts as ended)."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def child(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# A job with a grandchild in its own process group, as mpirun's ranks are; it prints the pid.
STUBBORN = """
import os, signal, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
print(rank.pid, flush=True)
time.sleep(60)
"""


def test_output_goes_to_log_and_callback(tmp_path: Path) -> None:
    lines: list[str] = []
    code = "import sys; print('one', flush=True); print('two', file=sys.stderr); sys.exit(3)"
    result = run_job(child(code), tmp_path / "log", 30, on_line=lines.append)
    assert (result.exit_code, result.timed_out) == (3, False)
    assert lines == ["one", "two"]
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_a_timeout_ends_the_whole_tree(tmp_path: Path) -> None:
    lines: list[str] = []
    result = run_job(child(STUBBORN), tmp_path / "log", 1.0, on_line=lines.append)
    assert result.timed_out
    assert result.seconds < 10
    assert gone(int(lines[0]))


def test_an_interrupt_ends_the_whole_tree(tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupt(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(child(STUBBORN), tmp_path / "log", 30, on_line=interrupt)
    assert gone(pids[0])


def test_a_job_that_leaves_a_child_behind_is_cleaned_up(tmp_path: Path) -> None:
    lines: list[str] = []
    result = run_job(
        child(STUBBORN.replace("time.sleep(60)\n", "", 1)), tmp_path / "log", 20, on_line=lines.append
    )
    assert not result.timed_out
    assert gone(int(lines[0]))


def test_default_kills_fit_the_run() -> None:
    assert default_injections(30, 4) == (
        "kill:rank=1,iteration=8,phase=backward,microbatch=1",
        "kill:rank=2,iteration=16,phase=reduce,bucket=1",
    )
    assert default_injections(4, 3)[1] == "kill:rank=2,iteration=2,phase=reduce,bucket=1"
    assert len(default_injections(30, 2)) == 1


def test_the_command_is_what_a_user_would_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(30, 4, ("kill:rank=1,iteration=8,phase=backward",), tmp_path, 60)
    data = DemoData(tmp_path / "corpus", tmp_path / "tokenizer", 1, 1, made=False)
    (tmp_path / "megatron-recover").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    command = launch_command(plan, data, plan.injections, plan.events)
    assert command[1:5] == ["launch", "-n", "4", "--"]
    assert command[5].endswith(os.path.join("scripts", "pretrain_gpt.py"))
    assert command[-4:] == [
        "--recover-events",
        str(tmp_path / "events.jsonl"),
        "--recover-inject",
        "kill:rank=1,iteration=8,phase=backward",
    ]
    (tmp_path / "megatron-recover").unlink()
    with pytest.raises(UserError, match="make venv"):
        launch_command(plan, data, (), None)


def test_the_verdict(tmp_path: Path) -> None:
    plan = Plan(3, 4, ("kill:rank=1,iteration=2,phase=backward",), tmp_path, 60)

    def run(*losses: float) -> Run:
        return Run({i: Point(i, 3, loss, None, None) for i, loss in enumerate(losses, start=1)})

    failed = run(5.0, 4.0, 3.0)
    assert "reports 0 lost ranks" in (verdict(run(5.0, 4.0, 3.0), failed, plan) or "")
    failed.failures = [Failure(2, [1], [1], "backward", 1, None)]
    assert verdict(run(5.0, 4.0, 3.00002), failed, plan) is None
    assert "at iteration 3 the losses differ" in (verdict(run(5.0, 4.0, 3.1), failed, plan) or "")
    assert "differ" in (verdict(run(5.0, 4.0, float("nan")), failed, plan) or "")
    assert "logged 2 of 3" in (verdict(run(5.0, 4.0), failed, plan) or "")


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replicas", "1"]) == 2
    assert "--replicas 1" in capsys.readouterr().err
    assert main(["--iterations", "2"]) == 2
    assert "--iterations 2" in capsys.readouterr().err
