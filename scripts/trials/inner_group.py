"""The ranks of one replica of the core trainer: they wait for each other over Unix sockets, outside of MPI.

Stands for the NCCL or Gloo group of a real replica, and behaves like one when a member is lost: who waits for a member
that is dead gets an error, who waits for one that is stopped waits for ever. It needs no torch, which takes longer to
import than a job of the core trainer lasts.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

_CONNECT_S = 60.0


class InnerGroup:
    """All ranks of a replica make one, at the same point.

    Args:
        path: of the socket, the same on all of them and on no other replica.
        size: ranks of the replica.
        place: this rank's, from 0.
    """

    def __init__(self, path: Path, size: int, place: int) -> None:
        self._others: list[Connection] = []
        if size == 1:
            return
        if place == 0:
            with Listener(str(path), "AF_UNIX", backlog=size) as listener:
                self._others = [listener.accept() for _ in range(size - 1)]
        else:
            self._others = [_connect(path)]
        self._is_first = place == 0

    def sum(self, value: float) -> float:
        """The sum over the ranks.

        Raises:
            EOFError, OSError: a member is dead.
        """
        if not self._others:
            return value
        if not self._is_first:
            self._others[0].send(value)
            return float(self._others[0].recv())
        total = value + sum(other.recv() for other in self._others)
        for other in self._others:
            other.send(total)
        return float(total)


def _connect(path: Path) -> Connection:
    limit = time.monotonic() + _CONNECT_S
    while True:
        try:
            return Client(str(path), "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):  # the first rank is not there yet
            if time.monotonic() > limit:
                raise
            time.sleep(0.01)
