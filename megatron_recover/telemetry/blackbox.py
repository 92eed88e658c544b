"""Flight recorder: where a rank is, in a small file that outlives it.

A process that is killed says nothing. Its last mark is in a file that is mapped into its memory, so the
kernel keeps it when the process is gone, and a survivor on the same host can tell in which phase it died.
A mark costs about a microsecond and no system call.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"MRBOX001"
_HEADER = struct.Struct("<8sqd")  # magic, pid, time of death
_DEATH = struct.Struct("<d")
_DEATH_OFFSET = 16
_CURRENT_OFFSET = _HEADER.size  # one byte: which of the two slots is valid
_MARK = struct.Struct("<qqd24s")  # iteration, index, time, phase
_SLOT_OFFSETS = (32, 32 + _MARK.size)
_SIZE = _SLOT_OFFSETS[1] + _MARK.size
_PHASE_BYTES = 24


@dataclass(frozen=True)
class Snapshot:
    """What a black box says. Times are unix seconds."""

    rank: int
    pid: int
    iteration: int
    """Iteration of the last mark, from 1; 0 before the first."""
    phase: str
    """Phase of the last mark; empty before the first."""
    index: int
    """Microbatch or bucket of the last mark; -1 where the phase has none."""
    marked_at: float
    """Time of the last mark; 0 before the first."""
    died_at: float
    """Time of death where the rank recorded it (injected faults do); 0 = none."""


def _path(directory: str | os.PathLike[str], rank: int) -> Path:
    return Path(directory) / f"blackbox-{rank}"


class BlackBox:
    """The writing end, one for each rank. Makes the directory and replaces what was there.

    Args:
        directory: on a local disk or in memory, shared by the ranks of a host.
        rank: start rank.
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int) -> None:
        path = _path(directory, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A fresh file put in place whole: a reader never sees a header that is half written.
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        with open(fresh, "w+b") as file:
            file.write(_HEADER.pack(_MAGIC, os.getpid(), 0.0).ljust(_SIZE, b"\0"))
            file.flush()
            self._map = mmap.mmap(file.fileno(), _SIZE)
        fresh.replace(path)
        self._slot = 0
        self._phases: dict[str, bytes] = {}

    def mark(self, phase: str, iteration: int, index: int = -1) -> None:
        """Records where this rank is. Called at every step of an iteration, so it does next to nothing."""
        name = self._phases.get(phase)
        if name is None:
            name = self._phases[phase] = phase.encode()[:_PHASE_BYTES]
        # The other slot is written and then made the valid one by a single byte: a rank that is killed
        # half-way through leaves its previous mark, not a mixture.
        slot = self._slot ^ 1
        _MARK.pack_into(self._map, _SLOT_OFFSETS[slot], iteration, index, time.time(), name)
        self._map[_CURRENT_OFFSET] = slot
        self._slot = slot

    def die(self) -> None:
        """Records now as the time of death: called by a rank that is about to end itself."""
        _DEATH.pack_into(self._map, _DEATH_OFFSET, time.time())

    def close(self) -> None:
        """Lets go of the file; what was recorded stays."""
        self._map.close()


def read_blackbox(directory: str | os.PathLike[str], rank: int) -> Snapshot | None:
    """Reads the black box of a rank, living or dead; None where there is none (another host, not started)."""
    try:
        data = _path(directory, rank).read_bytes()
    except OSError:
        return None
    if len(data) < _SIZE or not data.startswith(_MAGIC):
        return None
    _, pid, died_at = _HEADER.unpack_from(data)
    slot = _SLOT_OFFSETS[data[_CURRENT_OFFSET] & 1]
    iteration, index, marked_at, phase = _MARK.unpack_from(data, slot)
    if marked_at == 0.0:
        index = -1
    return Snapshot(
        rank, pid, iteration, phase.rstrip(b"\0").decode(errors="replace"), index, marked_at, died_at
    )
