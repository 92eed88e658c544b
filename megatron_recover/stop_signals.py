"""The signals that ask a launcher to stop, kept until somebody acts on them: between two tries of a job, too."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class StopSignals:
    """While the block runs, SIGINT, SIGTERM and SIGHUP do nothing but stand in ``pending``. From the main thread."""

    def __init__(self) -> None:
        self.pending: list[signal.Signals] = []
        """Received and not yet acted on, oldest first."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
                self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.pending.append(signal.Signals(signum))
