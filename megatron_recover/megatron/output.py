"""Seam: only the leader prints, writes TensorBoard and wandb; the next leader takes over where it ended."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from megatron_recover.megatron.adapter import Adapter
from megatron_recover.telemetry.metrics import MetricsWriter
from megatron_recover.telemetry.replay import ReplayWriter, forget, replay


def install(adapter: Adapter) -> None:
    """Lets writers be opened by the leader only, and adds the ``recover/`` metrics to Megatron's log."""
    _writers(adapter)
    _progress_log(adapter)
    _training_log(adapter)


def _writers(adapter: Adapter) -> None:
    from megatron.training import global_vars

    waiting: dict[str, tuple[Callable[[], None], ReplayWriter]] = {}

    def by_leader(opener: str, holder: str, flag: str) -> None:
        stock = getattr(global_vars, opener)

        @functools.wraps(stock)
        def open_writer(args: Any) -> None:
            if adapter.session.is_leader:
                stock(args)
            elif getattr(args, flag, None) and args.rank == args.world_size - 1:
                stand_in = ReplayWriter()
                setattr(global_vars, holder, stand_in)
                waiting[holder] = (lambda: stock(args)), stand_in

        setattr(global_vars, opener, open_writer)

    by_leader("_set_tensorboard_writer", "_GLOBAL_TENSORBOARD_WRITER", "tensorboard_dir")
    by_leader("_set_wandb_writer", "_GLOBAL_WANDB_WRITER", "wandb_project")
    _no_one_logger(adapter)

    def take_over() -> None:
        if not adapter.session.is_leader:
            return
        for holder, (open_late, stand_in) in waiting.items():
            setattr(global_vars, holder, None)
            open_late()
            writer = getattr(global_vars, holder)
            if writer is not None:
                replay(stand_in, writer)
        waiting.clear()

    def forget_all() -> None:
        for _, stand_in in waiting.values():
            forget(stand_in)

    adapter.on_leader_change.append(take_over)
    adapter.on_agreement.append(forget_all)


def _no_one_logger(adapter: Adapter) -> None:
    """NVIDIA's internal logger is opened by the first leader only; it cannot be taken over."""
    from megatron.training import global_vars

    stock = global_vars._set_one_logger

    @functools.wraps(stock)
    def open_logger(args: Any) -> None:
        if adapter.session.is_leader:
            stock(args)

    global_vars._set_one_logger = open_logger


def _progress_log(adapter: Adapter) -> None:
    """``--log-progress`` has one line for the job, not one for each replica, and a full disk costs only lines."""
    from megatron.training import checkpointing, training

    for module, name in (
        (training, "append_to_progress_log"),
        (training, "compute_throughputs_and_append_to_progress_log"),
        (checkpointing, "append_to_progress_log"),
    ):
        stock = getattr(module, name)

        def append(*args: Any, stock: Any = stock, of_save: bool = name.startswith("compute"), **options: Any) -> None:
            if adapter.session.is_leader and not (of_save and adapter.saver.is_unsaved):
                with contextlib.suppress(OSError):  # raised behind its barrier
                    stock(*args, **options)

        setattr(module, name, functools.wraps(stock)(append))


def _training_log(adapter: Adapter) -> None:
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
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
            tokens=settings.seq_length * get_current_global_batch_size(),
            write=iteration % settings.tensorboard_log_interval == 0,
        )
        return result

    training.training_log = training_log
    adapter.metrics = metrics
