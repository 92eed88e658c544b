"""``recover/`` metrics in the writers that Megatron has (TensorBoard, wandb). Field names: docs/metrics.md."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from megatron_recover.telemetry.recorder import Totals


class _Membership(Protocol):
    """What is asked of a session."""

    alive: tuple[int, ...]
    epoch: int

    @property
    def layout(self) -> Any: ...


class MetricsWriter:
    """Writes one point per logged iteration.

    Args:
        tensorboard, wandb: give Megatron's writer, or None on ranks that have none (now).
        totals: running numbers of the recorder.
    """

    def __init__(self, tensorboard: Callable[[], Any], wandb: Callable[[], Any], totals: Totals) -> None:
        self._tensorboard = tensorboard
        self._wandb = wandb
        self._totals = totals
        self._before = Totals()
        self._last_time: float | None = None
        self._tokens = 0

    def start(self) -> None:
        """Training begins: what came before does not count in tokens per second. A second call does nothing."""
        if self._last_time is None:
            self._last_time = time.monotonic()

    def log(self, iteration: int, session: _Membership, *, tokens: int, write: bool) -> None:
        """Adds an iteration of ``tokens`` tokens; writes what came since the last point when ``write``."""
        self.start()
        self._tokens += tokens
        if not write:
            return
        now, totals = time.monotonic(), self._totals
        speed = self._tokens / max(now - (self._last_time or now), 1e-9)
        living = len(session.alive) * session.layout.replica_size
        point = {
            "recover/alive_replicas": len(session.alive),
            "recover/epoch": session.epoch,
            "recover/repair(ms)": totals.repair_ms - self._before.repair_ms,
            "recover/redone_microbatches": totals.redone - self._before.redone,
            "recover/tokens_per_second": speed,
            "recover/tokens_per_second_per_living_rank": speed / living,
        }
        self._before = Totals(totals.repairs, totals.repair_ms, totals.redone)
        self._last_time, self._tokens = now, 0
        board, wandb = self._tensorboard(), self._wandb()
        if board is not None:
            for name, value in point.items():
                board.add_scalar(name, value, iteration)
        if wandb is not None:
            wandb.log(point, iteration)
