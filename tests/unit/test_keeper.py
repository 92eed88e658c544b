"""A rank's keeper and its lease, with real processes: what the outside sees of each way in which a rank ends."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_recover.lease import Lease, Stage, lease_path, read_lease

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, signal, sys, time
from megatron_recover.keeper import keep
from megatron_recover.lease import Stage, own_lease
def run():
    lease = own_lease()
    print("pid", os.getpid(), flush=True)
    {body}
    sys.stdin.read()
keep(run, {folder!r}, 3)
"""


def start(body: str, folder: Path) -> tuple[subprocess.Popen[str], int]:
    """Starts a keeper; returns it and the pid of its rank."""
    keeper = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body, folder=str(folder))],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout is not None
    word, pid = keeper.stdout.readline().split()
    assert word == "pid"
    return keeper, int(pid)


def wait_until_gone(pid: int) -> None:
    limit = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < limit, f"process {pid} is still there"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("os._exit(0)", 0),
        ("os._exit(1)", -signal.SIGKILL),
        ("lease.ends_with(72); os._exit(72)", 72),
        ("lease.ends_with(72); os._exit(1)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGKILL),
    ],
)
def test_an_end_that_was_not_announced_is_a_death(body: str, code: int, tmp_path: Path) -> None:
    keeper, _ = start(body, tmp_path)
    _, err = keeper.communicate(timeout=20)
    assert keeper.returncode == code, err
    assert ("rank 3 ended with exit code 1, without a word" in err) == ("os._exit(1)" in body)


@pytest.mark.parametrize("body", ["os.kill(os.getpid(), signal.SIGSTOP)", "pass"])
def test_a_rank_that_gives_no_sign_of_life_is_killed(body: str, tmp_path: Path) -> None:
    keeper, pid = start(f"lease.enter(Stage.TRAINING, 0.5); {body}", tmp_path)
    assert keeper.wait(20) == -signal.SIGKILL
    wait_until_gone(pid)
    assert keeper.stderr is not None
    err = keeper.stderr.read()
    assert f"rank 3 (process {pid}) has given no sign of life for" in err
    assert ("it is stopped" in err) == ("SIGSTOP" in body)


def test_a_rank_that_renews_its_lease_lives(tmp_path: Path) -> None:
    """And one that has none, however long it says nothing."""
    renew = "lease.enter(Stage.TRAINING, 0.5); [(time.sleep(0.1), lease.renew()) for _ in range(15)]; os._exit(0)"
    for body in (renew, "time.sleep(1.5); os._exit(0)"):
        keeper, _ = start(body, tmp_path)
        keeper.communicate(timeout=20)
        assert keeper.returncode == 0


def test_a_rank_does_not_outlive_its_keeper(tmp_path: Path) -> None:
    keeper, pid = start("pass", tmp_path)
    keeper.kill()
    keeper.wait(10)
    wait_until_gone(pid)


def test_signals_are_passed_on(tmp_path: Path) -> None:
    keeper, _ = start("signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); print('ready', flush=True)", tmp_path)
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == "ready\n"
    keeper.terminate()
    keeper.communicate(timeout=20)
    assert keeper.returncode == 0


def test_a_lease_is_read_from_outside(tmp_path: Path) -> None:
    lease = Lease(tmp_path, 2, keeper_pid=17)
    state = read_lease(tmp_path, 2)
    assert state is not None
    assert (state.pid, state.keeper_pid, state.stage, state.code) == (0, 17, Stage.STARTING, None)
    assert not state.is_over
    lease.begin()
    lease.enter(Stage.TRAINING, 1e-9)
    state = read_lease(tmp_path, 2)
    assert state is not None
    assert state.pid == os.getpid()
    assert state.stage is Stage.TRAINING
    assert state.is_over
    lease.ends_with(70)
    state = read_lease(tmp_path, 2)
    assert state is not None
    assert (state.code, state.stage, state.is_over) == (70, Stage.ENDING, False)
    assert read_lease(tmp_path, 5) is None


def test_a_reader_never_sees_half_of_a_renewal(tmp_path: Path) -> None:
    """A lease that seems to be as old as the machine would cost a healthy rank its life."""
    program = (
        "from megatron_recover.lease import Lease; import sys\n"
        f"lease = Lease({str(tmp_path)!r}, 1); lease.begin(); print('ready', flush=True)\n"
        "while True: lease.renew()"
    )
    writer = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        reader = Lease.__new__(Lease)  # the same memory, as a keeper has it
        with open(lease_path(tmp_path, 1), "r+b") as file:
            reader._map, reader.rank = mmap.mmap(file.fileno(), 0), 1
        ages = [reader.read().age_s for _ in range(300_000)]
    finally:
        writer.kill()
        writer.wait()
    assert max(ages) < 60
