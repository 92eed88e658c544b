"""The event log: whole lines whoever writes, tolerant reading, and no trouble for training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

from megatron_recover.telemetry import events
from megatron_recover.telemetry.events import EventLog, read_events

REPOSITORY = Path(__file__).resolve().parents[2]


def test_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a" / "events.jsonl"
    log = EventLog(path)
    assert not path.exists(), "a rank that writes nothing makes no file"
    before = time.time()
    log.write(events.FAILURE, iteration=5, epoch=0, ranks=[3], phase=None, detect_ms=1.5)
    log.write(events.REPAIR, iteration=5, epoch=1, alive=(0, 1), replicas_lost={3, 2})
    assert path.read_text().count("\n") == 2, "there without close"
    first, second = read_events(path)
    assert before <= first.pop("time") <= time.time()
    assert first == {
        "event": "failure",
        "iteration": 5,
        "epoch": 0,
        "ranks": [3],
        "phase": None,
        "detect_ms": 1.5,
    }
    assert second["alive"] == [0, 1]
    assert second["replicas_lost"] == [2, 3]
    log.close()
    log.write(events.FINISH, iteration=6, epoch=1)
    assert len(read_events(path)) == 2


def test_values_that_json_does_not_have(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e")
    log.write(
        "start",
        iteration=0,
        epoch=0,
        a=numpy.float32(1.5),
        b=numpy.arange(2),
        c=float("nan"),
        d=tmp_path,
        e={1: ()},
    )
    (event,) = [
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "e").read_text().splitlines()
    ]
    assert (event["a"], event["b"], event["c"], event["d"], event["e"]) == (
        1.5,
        [0, 1],
        None,
        str(tmp_path),
        {"1": []},
    )


def test_no_path_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    EventLog(None).write("start", iteration=0, epoch=0)
    assert os.listdir(tmp_path) == []


def test_goes_on_after_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "start", "iteration": 0}\n{"event": "failu')
    assert [event["event"] for event in read_events(path)] == ["start"]
    EventLog(path).write("takeover", iteration=3, epoch=1, leader=1)
    assert [event["event"] for event in read_events(path)] == ["start", "takeover"]


def test_two_writers_never_interleave(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    program = (
        "import sys; from megatron_recover.telemetry.events import EventLog\n"
        f"log = EventLog({str(path)!r})\n"
        "for i in range(300): log.write('commit', iteration=i, epoch=0, who=sys.argv[1],"
        " text=sys.argv[1] * 2000)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, who], cwd=REPOSITORY) for who in "ab"]
    try:
        assert [writer.wait(30) for writer in writers] == [0, 0]
    finally:
        for writer in writers:
            writer.kill()
    found = read_events(path)
    assert len(found) == 600
    for who in "ab":
        mine = [event for event in found if event["who"] == who]
        assert [event["iteration"] for event in mine] == list(range(300))
        assert all(event["text"] == who * 2000 for event in mine)


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null/events.jsonl"])
def test_a_file_that_cannot_be_written_is_one_warning(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    log = EventLog(path)
    for iteration in range(3):
        log.write("commit", iteration=iteration, epoch=0)
    warning = capsys.readouterr().err
    assert warning.count("warning: cannot write events") == 1
    assert path in warning
