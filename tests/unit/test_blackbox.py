"""The flight recorder: what is marked can be read while the rank lives and when it is dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron_recover.telemetry.blackbox import BlackBox, read_blackbox

REPOSITORY = Path(__file__).resolve().parents[2]


def test_marks_are_read_back(tmp_path: Path) -> None:
    before = time.time()
    box = BlackBox(tmp_path / "made" / "by it", 7)
    snapshot = read_blackbox(tmp_path / "made" / "by it", 7)
    assert snapshot is not None
    assert (snapshot.rank, snapshot.pid, snapshot.iteration, snapshot.phase) == (7, os.getpid(), 0, "")
    assert (snapshot.index, snapshot.marked_at, snapshot.died_at) == (-1, 0.0, 0.0)
    for iteration, phase, index in ((1, "data", 0), (2**40, "after-commit", -1), (3, "reduce", 12)):
        box.mark(phase, iteration, index)
        snapshot = read_blackbox(tmp_path / "made" / "by it", 7)
        assert snapshot is not None
        assert (snapshot.iteration, snapshot.phase, snapshot.index) == (iteration, phase, index)
        assert before <= snapshot.marked_at <= time.time()
    box.die()
    box.close()
    snapshot = read_blackbox(tmp_path / "made" / "by it", 7)
    assert snapshot is not None
    assert before <= snapshot.died_at <= time.time()
    assert snapshot.phase == "reduce"


def test_no_black_box(tmp_path: Path) -> None:
    assert read_blackbox(tmp_path, 0) is None
    assert read_blackbox(tmp_path / "nowhere", 0) is None
    (tmp_path / "blackbox-0").write_bytes(b"something else" * 20)
    assert read_blackbox(tmp_path, 0) is None
    (tmp_path / "blackbox-0").write_bytes(b"MRBOX001")
    assert read_blackbox(tmp_path, 0) is None


def test_a_new_job_starts_afresh(tmp_path: Path) -> None:
    old = BlackBox(tmp_path, 0)
    old.mark("save", 9)
    old.die()
    BlackBox(tmp_path, 0)
    snapshot = read_blackbox(tmp_path, 0)
    assert snapshot is not None
    assert snapshot.phase == ""
    assert snapshot.died_at == 0.0
    assert os.listdir(tmp_path) == ["blackbox-0"]


def test_survives_a_sigkill_while_marking(tmp_path: Path) -> None:
    program = (
        "from megatron_recover.telemetry.blackbox import BlackBox\n"
        f"box = BlackBox({str(tmp_path)!r}, 1); box.mark('even', 2, 2); print('go', flush=True); i = 3\n"
        "while True:\n"
        "    box.mark('odd' if i % 2 else 'even', i, i)\n"
        "    i += 1\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE)
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"go\n"
        time.sleep(0.1)
    finally:
        rank.kill()
    assert rank.wait(10) == -signal.SIGKILL
    snapshot = read_blackbox(tmp_path, 1)
    assert snapshot is not None
    assert snapshot.pid == rank.pid
    assert snapshot.index == snapshot.iteration >= 2, "one mark, not a mixture of two"
    assert snapshot.phase == ("odd" if snapshot.iteration % 2 else "even")


def test_a_mark_is_cheap(tmp_path: Path) -> None:
    box = BlackBox(tmp_path, 0)
    best = float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(1000):
            box.mark("forward", 1, 1)
        best = min(best, (time.perf_counter() - begin) / 1000)
    assert best < 10e-6  # about 0.6 microseconds on an idle core
