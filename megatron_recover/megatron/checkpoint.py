"""Seam: checkpoints are written by the leader replica alone, and read by all.

Everything inside a save is replica-local, and one replica holds the whole state, so such a checkpoint is an
ordinary Megatron checkpoint that any number of replicas (or vanilla Megatron) can load. The other replicas wait;
when the leader is lost in the middle, the next one saves again. A disk that does not take a checkpoint costs that
checkpoint, and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import IO, Any

from megatron_recover.errors import NotSaved
from megatron_recover.megatron import background, shards, tracker
from megatron_recover.megatron.adapter import Adapter
from megatron_recover.megatron.attempt import NotNamed, tolerate
from megatron_recover.megatron.disk import disk_problem
from megatron_recover.megatron.saver import Saver


def install(adapter: Adapter) -> None:
    """Replaces the names under which training saves, and those with which a save uses the disk."""
    saver = adapter.saver = Saver(adapter)
    _training(adapter, saver)
    _files(saver)
    shards.install(lambda: saver.current, saver.wrote_a_part)
    background.install()


def _training(adapter: Adapter, saver: Saver) -> None:
    """What the training loop calls, on all ranks."""
    from megatron.training import training

    stock_save, stock_finalize = training.save_checkpoint, training.maybe_finalize_async_save
    stock_decide = training.checkpoint_and_decide_exit

    @functools.wraps(stock_save)
    def save_checkpoint(iteration: int, *args: Any, **options: Any) -> None:
        saver.save(iteration, lambda: stock_save(iteration, *args, **options))

    @functools.wraps(stock_decide)
    def checkpoint_and_decide_exit(*args: Any, **options: Any) -> Any:
        saver.is_ending = False
        should_exit = stock_decide(*args, **options)
        if saver.lost_one:  # and none was due here, which would have made up for it
            saver.is_ending = bool(should_exit)
            model, optimizer, scheduler, iteration, operations, context, data_iterator = args
            training.save_checkpoint_and_time(
                iteration, model, optimizer, scheduler, operations, context, train_data_iterator=data_iterator
            )
        return should_exit

    @functools.wraps(stock_finalize)
    def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
        if blocking:
            finish(adapter)
        stock_finalize(blocking, terminate)
        if blocking and terminate and adapter.is_trained:
            raise_if_unsaved(adapter)

    training.save_checkpoint = save_checkpoint
    training.checkpoint_and_decide_exit = checkpoint_and_decide_exit
    training.maybe_finalize_async_save = maybe_finalize_async_save


def _files(saver: Saver) -> None:
    """What a save does with the disk on one rank, between two collectives of the replica."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.msc_utils import MultiStorageClientFeature
    from megatron.training import checkpointing

    for owner, name in (
        (checkpointing, "ensure_directory_exists"),
        (serialization, "save_config"),
        (serialization, "save_integrity_manifest"),
    ):
        tolerate(owner, name, lambda: saver.current)

    stock_write, stock_schedule = checkpointing.dist_checkpointing.save, checkpointing.schedule_async_save

    @functools.wraps(stock_write)
    def write(*args: Any, **options: Any) -> Any:
        saver.check_after_barrier()  # the folder is there
        request = stock_write(*args, **options)
        if request is None:
            saver.check_written()
        else:
            request.finalize_fns.append(saver.check_written)
        return request

    @functools.wraps(stock_schedule)
    def schedule_async_save(request: Any) -> None:
        stock_schedule(request._replace(finalize_fns=[saver.schedule(list(request.finalize_fns))]))

    @contextlib.contextmanager
    def name_it(opened: contextlib.AbstractContextManager[IO[str]]) -> Iterator[IO[str]]:
        """The writing of the tracker, by the replica's first rank."""
        attempt = saver.current
        if attempt is not None and attempt.problem is not None:
            raise NotNamed  # another rank's file is missing (formats without a check of their own)
        try:
            with opened as file:
                yield file
        except OSError as error:
            if attempt is None or (problem := disk_problem(error)) is None:
                raise
            attempt.note(problem)
            raise NotNamed from error
        saver.at_step("named")

    checkpointing.dist_checkpointing.save = write
    checkpointing.schedule_async_save = schedule_async_save
    checkpointing.maybe_msc = tracker.Files(checkpointing.maybe_msc, MultiStorageClientFeature.is_enabled, name_it)


def save_now(adapter: Adapter, iteration: int) -> str:
    """Saves the state after ``iteration`` committed iterations, if --save is set. Returns what came of it."""
    from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
    from megatron.training import get_args

    folder = get_args().save
    if not folder or adapter.optimizer is None:
        return "nothing is saved because --save is not set"
    # The machine's state goes into the checkpoint: it must say "between iterations", although we are inside one.
    machine = get_rerun_state_machine()
    machine.state, machine.current_iteration = RerunState.NOT_RUNNING_YET, iteration
    adapter.saver.is_ending = True
    _save_at(adapter, iteration)
    finish(adapter)
    if adapter.saver.is_unsaved:
        return f"the state after iteration {iteration} is NOT saved: {adapter.saver.explain()}"
    return (
        f"the state after iteration {iteration} is saved in {folder}: start again with --load on the replicas that "
        "are left"
    )


def finish(adapter: Adapter) -> None:
    """Waits, on all ranks, until what is saved in the background is saved; if its leader is lost meanwhile, again."""
    from megatron.training import get_args

    while get_args().async_save:
        adapter.saver.finish()
        if not adapter.saver.lost_one:
            return
        _save_at(adapter, adapter.completed)


def raise_if_unsaved(adapter: Adapter) -> None:
    """Called at the end of training, by all ranks.

    Raises:
        NotSaved: on all of them: the last checkpoint did not get to the disk.
    """
    if adapter.saver.is_unsaved:
        raise NotSaved(
            f"training has ended, but the state after iteration {adapter.completed} is NOT saved: "
            f"{adapter.saver.explain()}"
        )


def _save_at(adapter: Adapter, iteration: int) -> None:
    from megatron.training import training

    training.save_checkpoint_and_time(
        iteration, adapter.model, adapter.optimizer, adapter.scheduler, adapter.floating_point_operations, {}
    )
