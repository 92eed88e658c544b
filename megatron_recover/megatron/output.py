"""Seam: only the leader prints, writes TensorBoard and wandb; the next leader takes over where it ended."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_recover.megatron.adapter import Adapter
from megatron_recover.telemetry.metrics import MetricsWriter


def install(adapter: Adapter) -> None:
    """Lets writers be opened by the leader only, and adds the ``recover/`` metrics to Megatron's log."""
    _writers(adapter)
    _training_log(adapter)


def _writers(adapter: Adapter) -> None:
    from megatron.training import global_vars

    waiting: dict[str, Callable[[], None]] = {}

    def by_leader(name: str) -> None:
        stock = getattr(global_vars, name)

        @functools.wraps(stock)
        def open_writer(args: Any) -> None:
            if adapter.session.is_leader:
                stock(args)
            else:
                waiting[name] = lambda: stock(args)

        setattr(global_vars, name, open_writer)

    for name in ("_set_tensorboard_writer", "_set_wandb_writer", "_set_one_logger"):
        by_leader(name)

    def take_over() -> None:
        for open_late in waiting.values():
            open_late()
        waiting.clear()

    adapter.on_leader_change.append(take_over)


def _training_log(adapter: Adapter) -> None:
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer, training

    stock = training.training_log
    metrics = MetricsWriter(get_tensorboard_writer, get_wandb_writer, adapter.recorder.totals)

    @functools.wraps(stock)
    def training_log(
        loss_dict: Any, total_loss_dict: Any, learning_rate: Any, iteration: int, *args: Any, **options: Any
    ) -> Any:
        settings, session = get_args(), adapter.session
        own = settings.world_size
        # Throughput per GPU is over all living ranks, not over this replica's.
        settings.world_size = own * len(session.alive)
        try:
            result = stock(loss_dict, total_loss_dict, learning_rate, iteration, *args, **options)
        finally:
            settings.world_size = own
        metrics.log(
            iteration,
            session,
            tokens=settings.seq_length * settings.global_batch_size,
            write=iteration % settings.tensorboard_log_interval == 0,
        )
        return result

    training.training_log = training_log
