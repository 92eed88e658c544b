"""Checkpoints without a helper process, unless vanilla Megatron saves them in the background."""

from __future__ import annotations

import queue
from typing import Any


def install() -> None:
    """Let a checkpoint that is saved by the training process itself report its result through a plain queue.

    Megatron starts a manager process per rank for that queue, which only writing by another process needs (with
    ``--async-save``, and not with ``--recover``, which writes on a thread). Starting it
    takes seconds, because it runs the top of the training script again, and it survives its parent: mpirun
    then never ends. Every save has a queue of its own: what a save that failed may have left in a common one would be
    taken for the result of the next.

    Imports Megatron, so the device must be installed first. A second call does nothing.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import get_args

    between_processes = filesystem_async.get_write_results_queue
    if getattr(between_processes, "is_plain_if_it_can", False):
        return

    def get_write_results_queue(*args: Any, **options: Any) -> Any:
        settings = get_args()
        by_other_process = settings.async_save and not getattr(settings, "recover", False)
        return between_processes(*args, **options) if by_other_process else queue.Queue()

    get_write_results_queue.is_plain_if_it_can = True  # type: ignore[attr-defined]
    filesystem_async.get_write_results_queue = get_write_results_queue
