"""Event log of a run: one JSON object a line, described for readers in docs/events.md.

It is written by the leader, by the next leader after a takeover, and never gets in the way of training:
whatever goes wrong with the file is one warning on stderr.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

START = "start"
FAILURE = "failure"
REPAIR = "repair"
LEAVE = "leave"
TAKEOVER = "takeover"
COMMIT = "commit"
FINISH = "finish"
EVENTS = (START, FAILURE, REPAIR, LEAVE, TAKEOVER, COMMIT, FINISH)


class Event(TypedDict):
    """In every object."""

    event: str
    time: float
    """Unix seconds."""
    iteration: int
    """From 1, as the training log prints it; 0 before the first."""
    epoch: int
    """Number of repairs before this event."""


class StartEvent(Event):
    """The job has started."""

    num_ranks: int
    replica_size: int
    num_replicas: int
    policy: str
    number_of_try: int
    """1, and more when the launcher has started the job again."""
    versions: dict[str, str]


class FailureEvent(Event):
    """Ranks are dead. Written by the leader of the survivors together with the repair; ``time`` is the notice."""

    ranks: list[int]
    """Start ranks that died."""
    replicas: list[int]
    """Replicas they belonged to."""
    hosts: list[str]
    phase: str | None
    """Where the dead rank was when it died; null when its black box cannot be read (another host)."""
    index: int | None
    """Microbatch or bucket in that phase."""
    detect_ms: float | None
    """From the death to its detection; null when the time of death is not known."""


class LeaveEvent(Event):
    """Replicas leave in good order (sent SIGTERM), or are dropped by the others. A repair follows, and no failure."""

    replicas: list[int]
    reason: str


class RepairEvent(Event):
    """World and cross-replica groups are whole again; ``epoch`` is the new one."""

    ranks_lost: list[int]
    """Start ranks gone with this repair: the dead and the orphans."""
    replicas_lost: list[int]
    alive: list[int]
    """Living replicas after it."""
    repair_ms: float
    """From detection to the agreed new world, settling included."""
    settle_ms: float
    """Of which waiting until no more deaths came in."""


class TakeoverEvent(Event):
    """The leader was lost; this replica prints and saves from now on."""

    leader: int


class CommitEvent(Event):
    """An iteration that took more than one round is complete. Iterations without a failure write nothing."""

    rounds: int
    redone: int
    """Microbatches that were run again because the replica that had them was lost."""
    alive: list[int]


class FinishEvent(Event):
    """The job has ended."""

    exit_code: int
    reason: str


def _plain(value: Any) -> Any:
    """The nearest thing that JSON has: numpy numbers become numbers, nan and inf null, the rest text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(_plain(item) for item in value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays, tensors
        return _plain(value.tolist())
    return str(value)


class EventLog:
    """Appends events to a file.

    Args:
        path: file to append to, its parent directories are made; None writes nothing. The file is opened
            with the first event, so that ranks that never write do not touch it.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = None if path is None else Path(path)
        self._fd: int | None = None
        self._broken = False
        self._lock = threading.Lock()

    def write(self, event: str, *, iteration: int, epoch: int, **fields: Any) -> None:
        """Appends one event with the current time. Never raises for the file: the first failure is a warning.

        Args:
            event: one of ``EVENTS``.
            iteration: from 1 (0 before the first).
            epoch: number of repairs so far.
            fields: the rest of the event's TypedDict.
        """
        if self._path is None or self._broken:
            return
        with self._lock:
            try:
                record = {
                    "event": event,
                    "time": time.time(),
                    "iteration": iteration,
                    "epoch": epoch,
                    **fields,  # may bring the time at which it happened
                }
                self._append(json.dumps(_plain(record)).encode() + b"\n")
            except Exception as error:  # a full disk, a quota, a lost file system: not training's business
                self._broken = True
                print(
                    f"megatron_recover: warning: cannot write events to {self._path} ({error}); "
                    "training goes on without the event log.",
                    file=sys.stderr,
                    flush=True,
                )

    def close(self) -> None:
        """Closes the file; further events are dropped."""
        with self._lock:
            self._broken = True
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _append(self, line: bytes) -> None:
        if self._fd is None:
            assert self._path is not None
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                line = b"\n" + line  # a writer died in the middle of a line: do not continue that line
        # One write of a whole line to a file opened for appending: two writers never interleave.
        written = os.write(self._fd, line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written")


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Events of a file in order. Lines cut off by the death of their writer are left out.

    Raises:
        OSError: the file cannot be read.
    """
    return parse_events(Path(path).read_text(encoding="utf-8", errors="replace").splitlines())


def parse_events(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The events in lines of such a file, in order; a line that was cut off is left out."""
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            events.append(event)
    return events
