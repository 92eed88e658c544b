"""Seam: ``--async-save``. The leader's shards are written by a thread of the rank, not by a process.

Megatron's worker process would outlive a rank that is killed, and with it the process that manages its results; and
it reads tensors of a CPU while training changes them. A thread ends with its rank, and gets a copy. What Megatron does
in later iterations (asking whether all ranks are done, finishing the checkpoint) is Megatron's own.
"""

from __future__ import annotations

import concurrent.futures
from typing import Any

_writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="recover-save")
"""One thread: checkpoints are written one after another, in the order in which they were scheduled."""


class ThreadCaller:
    """What Megatron's queue of saves calls to carry one out (in the place of its ``AsyncCaller``)."""

    def __init__(self) -> None:
        self._written: concurrent.futures.Future[None] | None = None

    def schedule_async_call(self, request: Any) -> None:
        """Copies what is to be written to host memory, and lets the thread write it."""
        import torch

        if request.async_fn is None:  # nothing to write on this rank
            return
        rank, buckets, results = request.async_fn_args
        staged = request.preload_fn()
        torch.cuda.synchronize()
        copies = [
            (path, key, (data, [_copied(*pair) for pair in zip(tensors, to_host, strict=True)]))
            for (_, _, (_, tensors)), (path, key, (data, to_host)) in zip(buckets, staged, strict=True)
        ]
        self._written = _writer.submit(request.async_fn, rank, copies, results, **request.async_fn_kwargs)

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether all ranks of the replica have written; with ``blocking``, waits until they have."""
        import torch

        if blocking and self._written is not None:
            concurrent.futures.wait([self._written])
        busy = self._written is not None and not self._written.done()
        if no_dist:
            return not busy
        busy_ranks = torch.tensor([int(busy)], dtype=torch.int, device=torch.cuda.current_device())
        torch.distributed.all_reduce(busy_ranks)
        return not busy_ranks.item()

    def close(self, abort: bool = False) -> None:
        """Waits for the thread, or does not."""
        if self._written is not None and not abort:
            concurrent.futures.wait([self._written])


def install() -> None:
    """Replaces Megatron's worker process. Imports Megatron."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.training import initialize

    AsyncCallsQueue._get_async_caller = lambda self: ThreadCaller()
    initialize.init_persistent_async_worker = lambda *args, **options: None


def is_under_way() -> bool:
    """Whether this rank has begun a save that it has not finished."""
    from megatron.training import async_utils

    return not async_utils.is_empty_async_queue()


def _copied(original: tuple[Any, Any], on_host: tuple[Any, Any]) -> tuple[Any, Any]:
    """The tensor in host memory; a copy also if it was there before, because training goes on in that one."""
    item, tensor = on_host
    return item, tensor.clone() if original[1].device.type == "cpu" else tensor
