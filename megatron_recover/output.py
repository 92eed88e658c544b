"""What the ranks print, passed on at once; only MPI's noise about its own missing help texts is left out."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from typing import IO, Any

from megatron_recover.status import MARK, is_withdrawal, read_status

_RULE = b"-" * 74
_SORRY = b"Sorry!  You were supposed to get help about:"
_NOISE = (  # after a failure, harmless
    b"OPAL ERROR: Attempt to redefine an existing data type",
    b"NBC_Progress: an error ",
)
_MAX_BLOCK_LINES = 15
_HOLD_S = 0.2


class NoiseFilter:
    """Removes MPI's apologies for help texts that its wheel does not carry.

    Such a message is a block between two rules of 74 dashes. Everything else goes through as it comes,
    unfinished lines (progress bars) too; only a rule of dashes is held until the next line, or for 0.2 s.
    """

    def __init__(self) -> None:
        self._tail = b""  # unfinished line that may be the beginning of a block
        self._block: list[bytes] = []  # lines held back
        self._is_line_start = True
        self.status: tuple[float, dict[str, Any] | None] | None = None
        """What a rank of another host has said last about the end of the job, and when (``time.time``)."""
        self.has_heard = False
        """A rank of another host has said something to the launcher."""

    @property
    def is_holding(self) -> bool:
        """Whether something waits for what comes next; call ``flush`` when nothing does."""
        return bool(self._tail or self._block)

    def feed(self, data: bytes) -> bytes:
        """Takes what was read and returns what may be shown."""
        out = bytearray()
        data = self._tail + data
        self._tail = b""
        *lines, rest = data.split(b"\n")
        for line in lines:
            out += self._line(line + b"\n")
            self._is_line_start = True
        if rest:
            if self._block or (self._is_line_start and _could_be_noise(rest)):
                self._tail = rest
            else:
                out += rest
                self._is_line_start = False
        return bytes(out)

    def flush(self) -> bytes:
        """Gives back what is held."""
        held = (b"".join(self._block) + self._tail).lstrip(b"\0")  # mpirun ends some messages with a zero byte
        self._is_line_start = self._is_line_start and (not held or held.endswith(b"\n"))
        self._block, self._tail = [], b""
        return held

    def _line(self, line: bytes) -> bytes:
        if not self._is_line_start:  # its beginning was shown already
            return line
        line = line.lstrip(b"\0")  # mpirun ends some of its messages with a zero byte
        if line.startswith(MARK):
            self.has_heard = True
            said = line[len(MARK) :]
            if (status := read_status(said)) is not None:
                self.status = time.time(), status
            elif is_withdrawal(said):
                self.status = time.time(), None
            return b""
        bare = line.rstrip()
        if not self._block:
            if bare == _RULE:
                self._block = [line]
                return b""
            return b"" if any(noise in bare for noise in _NOISE) else line
        opening, self._block = self._block, [*self._block, line]
        if len(opening) == 1 and not bare.startswith(_SORRY):  # a rule above something else
            held = b"".join(opening)
            if bare == _RULE:
                self._block = [line]
                return held
            self._block = []
            return held + line
        if bare == _RULE:
            self._block = []
            return b""
        if len(self._block) > _MAX_BLOCK_LINES:
            held, self._block = b"".join(self._block), []
            return held
        return b""


def _could_be_noise(start: bytes) -> bool:
    start = start.lstrip(b"\0")
    return _RULE.startswith(start.rstrip(b"\r")) or start.startswith(MARK) or MARK.startswith(start)


class Pump(threading.Thread):
    """Copies a pipe to a file descriptor, and to a log file if there is one, until the pipe ends.

    When the other side of ``target`` has gone (a closed terminal) the pipe is still emptied: a job must not
    stand still because nobody looks.
    """

    def __init__(
        self, source: IO[bytes], target: int, log: IO[bytes] | None, noise: NoiseFilter | None
    ) -> None:
        super().__init__(daemon=True)
        self._source = source
        self._target: int | None = target
        self._log = log
        self._noise = noise

    def run(self) -> None:
        fd = self._source.fileno()
        noise = self._noise
        while True:
            if noise is not None and noise.is_holding and not select.select([fd], [], [], _HOLD_S)[0]:
                self._write(noise.flush())
            data = os.read(fd, 1 << 16)
            if not data:
                break
            self._write(noise.feed(data) if noise is not None else data)
        if noise is not None:
            self._write(noise.flush())

    def _write(self, data: bytes) -> None:
        if not data:
            return
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.write(data)
                self._log.flush()
        view = memoryview(data)
        while view and self._target is not None:
            try:
                view = view[os.write(self._target, view) :]
            except BlockingIOError:
                select.select([], [self._target], [], 1.0)
            except OSError:
                self._target = None
