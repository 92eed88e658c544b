"""Checkpoints without a helper process, unless they are saved in the background."""

from __future__ import annotations

import queue
from typing import Any


def install() -> None:
    """Let a checkpoint that is saved by the training process itself report its result through a plain queue.

    Megatron starts a manager process per rank for that queue, which only ``--async-save`` needs. Starting it
    takes seconds, because it runs the top of the training script again, and it survives its parent: mpirun
    then never ends. Imports Megatron, so the device must be installed first. A second call does nothing.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import get_args

    between_processes = filesystem_async.get_write_results_queue
    if getattr(between_processes, "is_plain_if_it_can", False):
        return
    plain: queue.Queue[Any] = queue.Queue()

    def get_write_results_queue(*args: Any, **options: Any) -> Any:
        return between_processes(*args, **options) if get_args().async_save else plain

    get_write_results_queue.is_plain_if_it_can = True  # type: ignore[attr-defined]
    filesystem_async.get_write_results_queue = get_write_results_queue
