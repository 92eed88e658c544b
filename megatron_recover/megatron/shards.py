"""Seam: the writing of a checkpoint's shards, on whichever thread.

Megatron loses what the disk said on the way (it passes on the name of the error's class), and where one of several
writing threads fails it reports no result at all, so that the other ranks of the replica wait. Here the result of a
rank always arrives, and says what the disk said.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable
from typing import Any

from megatron_recover.megatron.attempt import Attempt, tolerate
from megatron_recover.megatron.disk import DiskFailure, disk_problem


def install(current: Callable[[], Attempt | None], after_part: Callable[[], None]) -> None:
    """Wraps Megatron's writer of shards. Imports Megatron.

    Args:
        current: the attempt whose files or results the training thread is busy with.
        after_part: called when one of a rank's files is on disk (on the writing thread).
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync as Writer

    stock_part, stock_write = Writer.write_preloaded_data, Writer.write_preloaded_data_multithread
    stock_results = Writer.retrieve_write_results
    errors: list[Exception] = []  # of the parts of the one save that is being written at a time

    @functools.wraps(stock_part)
    def write_part(*args: Any, **options: Any) -> Any:
        output = stock_part(*args, **options)
        if isinstance(output[1], Exception):
            errors.append(output[1])
        else:
            after_part()
        return output

    @functools.wraps(stock_write)
    def write(transforms: Any, use_msc: bool, rank: int, buckets: Any, results: Any) -> None:
        errors.clear()
        answers: queue.Queue[Any] = queue.Queue()
        try:
            stock_write(transforms, use_msc, rank, buckets, answers)
            answer = answers.get_nowait()
        except Exception as error:
            answer = error
        if isinstance(answer, Exception):
            problems = [problem for error in (*errors, answer) if (problem := disk_problem(error)) is not None]
            answer = DiskFailure(problems[0]) if problems else answer
        results.put(answer)

    @functools.wraps(stock_results)
    def retrieve_write_results(self: Any) -> Any:
        found = stock_results(self)
        # A list, or an error with its stack, which all ranks raise after they have gathered their results.
        cause = found[0].__cause__ if isinstance(found, tuple) else None
        attempt = current()
        if attempt is not None and isinstance(cause, DiskFailure):
            attempt.note(str(cause))
        return found

    Writer.write_preloaded_data = staticmethod(write_part)
    Writer.write_preloaded_data_multithread = staticmethod(write)
    Writer.retrieve_write_results = retrieve_write_results
    tolerate(Writer, "prepare_local_plan", current, instead=lambda self, plan: plan)
    tolerate(Writer, "finish", current)
