"""Run one training job as a child: output into a log, lines to a callback, nothing left behind."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

_TICK_S = 0.2
_SILENT_TICKS = 5
"""Ticks without output after the launcher's end, after which the output counts as ended."""
_GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL for a job that must end."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended."""

    exit_code: int
    """Of the launcher; negative for a signal, as ``subprocess`` counts."""
    timed_out: bool
    seconds: float


def run_job(
    command: Sequence[str],
    log: Path,
    timeout_s: float,
    *,
    on_line: Callable[[str], None],
    on_tick: Callable[[], None] = lambda: None,
    env: dict[str, str] | None = None,
) -> JobResult:
    """Run ``command`` to its end and write its output to ``log``.

    On a timeout, on Ctrl-C and on any other exception the whole tree of child processes is ended before this
    returns or raises.

    Args:
        command: program and arguments.
        log: file for stdout and stderr together, replaced.
        timeout_s: hard limit in seconds.
        on_line: called with each line of output as it comes, without its line break.
        on_tick: called about five times a second.
        env: environment; None means this process's own.
    """
    started = time.monotonic()
    timed_out = False
    lines: queue.Queue[str | None] = queue.Queue()
    # a session of its own: a Ctrl-C in the terminal reaches us only, and we end the job in order
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        encoding="utf-8", errors="replace", start_new_session=True, env=env,
    )  # fmt: skip
    assert process.stdout is not None
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    try:
        with log.open("w", encoding="utf-8") as file:
            silent_ticks = 0
            while silent_ticks < _SILENT_TICKS:
                timed_out = time.monotonic() - started > timeout_s
                if timed_out:
                    break
                taken, at_end = _forward(lines, file, on_line)
                on_tick()
                if at_end:
                    break
                # a grandchild that outlives the launcher may hold the pipe open: do not wait for it for ever
                silent_ticks = silent_ticks + 1 if process.poll() is not None and taken == 0 else 0
        if not timed_out:
            process.wait(timeout=max(_GRACE_S, timeout_s - (time.monotonic() - started)))
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        _end(process)
        process.stdout.close()
    return JobResult(process.returncode, timed_out, time.monotonic() - started)


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    """Thread body: move lines into the queue; None marks the end."""
    try:
        for line in stream:
            lines.put(line)
    except ValueError:  # closed while reading, because the job was ended
        pass
    finally:
        lines.put(None)


def _forward(
    lines: queue.Queue[str | None], file: IO[str], on_line: Callable[[str], None]
) -> tuple[int, bool]:
    """Take what comes within one tick; returns the number of lines, and whether the output has ended."""
    deadline = time.monotonic() + _TICK_S
    taken = 0
    while (left := deadline - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=left)
        except queue.Empty:
            break
        if line is None:
            return taken, True
        taken += 1
        file.write(line)
        file.flush()
        on_line(line.rstrip("\n"))
    return taken, False


def _end(process: subprocess.Popen[str]) -> None:
    """End the job if it still runs, and what its session still holds; a second Ctrl-C does not stop this."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
    try:
        _end_tree(process)
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _end_tree(process: subprocess.Popen[str]) -> None:
    left = _session_members(process.pid)
    if process.poll() is None:
        try:
            left += psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            pass
        process.send_signal(signal.SIGTERM)  # mpirun passes it on and cleans up after itself
        try:
            process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        left += _session_members(process.pid)
    for child in left:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass


def _session_members(session: int) -> list[psutil.Process]:
    """Processes of the session that the job's first process leads, without that process."""
    members = []
    for process in psutil.process_iter():
        try:
            if process.pid != session and os.getsid(process.pid) == session:
                members.append(process)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return members
