"""Ranks of this host that are gone without MPI knowing.

A rank that ends with a non-zero exit code is not reported as failed by Open MPI 5.0 (measured), and ULFM has no
call to report it. The others would wait for it for ever. A process id can be looked up, though, so the wait has a
way out: the job ends, with a message.
"""

from __future__ import annotations

import os
import time

from megatron_recover.collectives.layout import Layout

LOOK_EVERY_S = 1.0
PATIENCE_S = 5.0
"""Every other kind of death is known to MPI within a second; then the rank is repaired, not reported here."""


def pid_namespace() -> str:
    """Names the set of processes that this one can see; ranks in other containers have another."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class Neighbours:
    """Watches the processes of the other ranks on this host."""

    def __init__(self, layout: Layout, rank: int) -> None:
        mine = layout.places[rank]
        self._pids = {
            other: place.pid
            for other, place in enumerate(layout.places)
            if other != rank and (place.host, place.pid_namespace) == (mine.host, mine.pid_namespace)
        }
        self._next_look = time.monotonic() + LOOK_EVERY_S
        self._gone_since: dict[int, float] = {}

    def forget(self, ranks: tuple[int, ...]) -> None:
        """These are known to be dead."""
        for rank in ranks:
            self._pids.pop(rank, None)
            self._gone_since.pop(rank, None)

    def gone(self) -> tuple[int, ...]:
        """Ranks whose process has been gone for so long that MPI will not report it any more. Cheap to call often."""
        now = time.monotonic()
        if now < self._next_look:
            return ()
        self._next_look = now + LOOK_EVERY_S
        for rank, pid in self._pids.items():
            if os.path.exists(f"/proc/{pid}"):
                self._gone_since.pop(rank, None)
            else:
                self._gone_since.setdefault(rank, now)
        return tuple(rank for rank, since in self._gone_since.items() if now - since >= PATIENCE_S)
