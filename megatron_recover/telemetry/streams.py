"""Standard output and error of a rank: shown when its replica leads, kept in its own log otherwise.

Megatron prints on the first or last rank of what it takes for the job, so each replica would print the same.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

LOG_DIR = "MEGATRON_RECOVER_LOG_DIR"
"""Environment variable: a directory in which every rank keeps all it prints, in ``rank-N.log``."""


_KEEP = 1000
"""Writes that a rank which does not lead keeps, in case that it has to print them (see ``replay``)."""


class LeaderStream:
    """Passes on to ``target`` while ``leads()``, keeps it otherwise; always copies to ``log`` if there is one."""

    def __init__(self, target: TextIO, leads: Callable[[], bool], log: TextIO | None) -> None:
        self._target, self._leads, self._log = target, leads, log
        self._kept: list[str] = []

    def write(self, text: str) -> int:
        if self._log is not None:
            self._log.write(text)
        if self._leads():
            self._target.write(text)
        else:
            self._kept.append(text)
            if len(self._kept) > _KEEP:
                del self._kept[0]
        return len(text)

    def forget(self) -> None:
        """All ranks have agreed, so the leader has printed what this rank kept."""
        self._kept.clear()

    def hand_over(self) -> None:
        """This rank leads now: what the lost leader may not have printed is printed here."""
        self._target.write("".join(self._kept))
        self._kept.clear()

    def announce(self, text: str) -> None:
        """Writes whoever leads: for what a rank has to say on behalf of the job."""
        if self._log is not None:
            self._log.write(text)
        self._target.write(text)
        self.flush()

    def flush(self) -> None:
        for stream in (self._log, self._target):
            if stream is not None:
                stream.flush()

    def isatty(self) -> bool:
        return self._target.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def say(message: str) -> None:
    """One line of ours in the log, marked as such. Callers decide which rank speaks."""
    line = f" [recover] {time.strftime('%H:%M:%S')} {message}\n"
    if isinstance(sys.stdout, LeaderStream):
        sys.stdout.announce(line)
    else:
        sys.stdout.write(line)
        sys.stdout.flush()


def install(rank: int, leads: Callable[[], bool]) -> list[LeaderStream]:
    """Replaces ``sys.stdout`` and ``sys.stderr``; ``sys.__stderr__`` stays open for last words."""
    folder = os.environ.get(LOG_DIR)
    log = None
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        log = open(Path(folder) / f"rank-{rank}.log", "a", buffering=1)  # noqa: SIM115  (as long as the process)
    out, err = LeaderStream(sys.stdout, leads, log), LeaderStream(sys.stderr, leads, log)
    sys.stdout, sys.stderr = out, err
    return [out, err]
