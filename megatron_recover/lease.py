"""A rank's sign of life: a few numbers in memory that its keeper and the launcher can read.

Liveness is a lease. A rank renews it several times a second from a thread of its own (``watchdog``); one that is
stopped, swapped out, or whose Python lock is held by one call does not. When the lease has run out, the rank is
killed by its keeper (``keeper``), or by the launcher should the keeper be stopped as well. So on one host nobody is
declared dead who can still write a checkpoint, a log line or a message: being declared dead *is* being killed.

The file lives in the job's directory; a rank that has none keeps its lease in memory only.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"MRLEASE1"
_HEADER = struct.Struct("<8sqq")  # magic, pid of the rank, pid of its keeper
_STAGE, _TIMEOUT, _BEAT, _CODE, _SIZE = 24, 32, 40, 48, 56
_DOUBLE, _LONG = struct.Struct("<d"), struct.Struct("<q")
_NO_CODE = -1

SETUP_LEASE_S = 300.0
"""Lease of a rank that builds its model and data sets: imports hold Python's lock for seconds, training does not."""


class Stage(enum.IntEnum):
    """How far a rank has come."""

    STARTING = 0
    """MPI is not up: a rank that is lost now takes the start with it. No lease yet."""
    SETTING_UP = 1
    """The engine runs. Lease: ``SETUP_LEASE_S``."""
    TRAINING = 2
    """Lease: ``--recover-heartbeat-timeout``."""
    ENDING = 3
    """All living ranks have agreed that the job ends, or the rank is about to leave. No lease any more."""


@dataclass(frozen=True)
class LeaseState:
    """What a lease says at one moment."""

    rank: int
    pid: int
    """The rank; 0 while it has not begun."""
    keeper_pid: int
    """Its keeper; 0 where it has none."""
    stage: Stage
    timeout_s: float
    """0: no lease."""
    age_s: float
    """Seconds since it was renewed."""
    code: int | None
    """Exit code that the rank has said it will end with, for the whole job; None before that."""

    @property
    def is_over(self) -> bool:
        return self.timeout_s > 0 and self.age_s > self.timeout_s


def lease_path(directory: str | os.PathLike[str], rank: int) -> Path:
    return Path(directory) / f"lease-{rank}"


class Lease:
    """The writing end. Made by the keeper before it starts the rank, or by the rank itself.

    Args:
        directory: the job's directory on this host, or None.
        rank: start rank.
        keeper_pid: 0 where the rank has none.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, rank: int, keeper_pid: int = 0) -> None:
        self.rank = rank
        header = _HEADER.pack(_MAGIC, 0, keeper_pid).ljust(_SIZE, b"\0")
        if directory is None:
            self._map = mmap.mmap(-1, _SIZE)
            self._map[:] = header
        else:
            path = lease_path(directory, rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f"{path.name}.{os.getpid()}")
            with open(fresh, "w+b") as file:
                file.write(header)
                file.flush()
                self._map = mmap.mmap(file.fileno(), _SIZE)
            fresh.replace(path)
        self._put(_CODE, _LONG.pack(_NO_CODE))

    def _put(self, place: int, value: bytes) -> None:
        # As one piece: pack_into clears the bytes before it writes them, and a reader in between would see a rank that
        # was last heard of when the machine started.
        self._map[place : place + len(value)] = value

    def begin(self) -> None:
        """Called by the rank: this process is the one that the lease is about."""
        self._put(8, _LONG.pack(os.getpid()))
        self.renew()

    def enter(self, stage: Stage, timeout_s: float = 0.0) -> None:
        """From here on the lease runs out ``timeout_s`` seconds after it was last renewed; 0: never."""
        self.renew()
        self._put(_TIMEOUT, _DOUBLE.pack(timeout_s))
        self._put(_STAGE, _LONG.pack(stage))

    def renew(self) -> None:
        """The rank is alive now."""
        self._put(_BEAT, _DOUBLE.pack(time.monotonic()))

    def ends_with(self, code: int) -> None:
        """The rank is about to end with this exit code on behalf of the job; another code is a failure."""
        self._put(_CODE, _LONG.pack(code))
        self.enter(Stage.ENDING)

    def read(self) -> LeaseState:
        return _decode(bytes(self._map), self.rank)


def read_lease(directory: str | os.PathLike[str], rank: int) -> LeaseState | None:
    """The lease of a rank of this host; None where there is none."""
    try:
        data = lease_path(directory, rank).read_bytes()
    except OSError:
        return None
    return _decode(data, rank) if len(data) >= _SIZE and data.startswith(_MAGIC) else None


def _decode(data: bytes, rank: int) -> LeaseState:
    _, pid, keeper_pid = _HEADER.unpack_from(data)
    (stage,), (code,) = _LONG.unpack_from(data, _STAGE), _LONG.unpack_from(data, _CODE)
    (timeout_s,), (beat,) = _DOUBLE.unpack_from(data, _TIMEOUT), _DOUBLE.unpack_from(data, _BEAT)
    return LeaseState(
        rank=rank,
        pid=pid,
        keeper_pid=keeper_pid,
        stage=Stage(stage),
        timeout_s=timeout_s,
        age_s=time.monotonic() - beat if beat else 0.0,  # not renewed yet
        code=None if code == _NO_CODE else code,
    )


_mine: Lease | None = None


def own_lease(directory: str | os.PathLike[str] | None = None, rank: int = 0) -> Lease:
    """The lease of this process: the one that its keeper made, otherwise a new one."""
    global _mine
    if _mine is None:
        _mine = Lease(directory, rank)
        _mine.begin()
    return _mine


def inherit(lease: Lease) -> None:
    """Called in the rank right after its keeper has started it."""
    global _mine
    _mine = lease
    lease.begin()
