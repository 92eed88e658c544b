"""Gathering a few bytes from every member of a group in one collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpi4py import MPI

_HEADER = 8


class Exchange:
    """All-gather of byte strings of different lengths.

    Slots have a fixed size that all members share, so one all-gather is enough; when a payload does not
    fit, every member sees that from the lengths, all grow alike, and gather once more. After a failure use
    a new one: a gather that did not complete everywhere leaves the sizes unequal.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity

    def gather(self, comm: MPI.Intracomm, payload: bytes, wait: Callable[..., None]) -> list[bytes]:
        """The payloads of all members, in group order.

        Args:
            comm: the group.
            payload: this member's bytes.
            wait: ``wait(request, keep)`` completes a request or raises.
        """
        while True:
            slot: NDArray[np.uint8] = np.zeros(_HEADER + self._capacity, np.uint8)
            slot[:_HEADER] = np.frombuffer(len(payload).to_bytes(_HEADER, "little"), np.uint8)
            fits = payload[: self._capacity]
            slot[_HEADER : _HEADER + len(fits)] = np.frombuffer(fits, np.uint8)
            everyone: NDArray[np.uint8] = np.empty((comm.Get_size(), slot.size), np.uint8)
            wait(comm.Iallgather(slot, everyone), (slot, everyone))
            lengths = [int.from_bytes(row[:_HEADER].tobytes(), "little") for row in everyone]
            if max(lengths) <= self._capacity:
                return [
                    row[_HEADER : _HEADER + length].tobytes()
                    for row, length in zip(everyone, lengths, strict=True)
                ]
            self._capacity = 1 << (max(lengths) - 1).bit_length()
