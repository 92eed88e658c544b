"""Seam: checkpoints are written by the leader replica alone, and read by all.

Everything inside a save is replica-local, and one replica holds the whole state, so such a checkpoint is an
ordinary Megatron checkpoint that any number of replicas (or vanilla Megatron) can load. The other replicas wait;
when the leader is lost in the middle, the next one saves again.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_recover.megatron.adapter import Adapter


def install(adapter: Adapter) -> None:
    """Replaces the name under which training saves, and marks the middle of a save for failure injection."""
    from megatron.training import checkpointing, training

    stock_save = training.save_checkpoint
    stock_write = checkpointing.dist_checkpointing.save

    @functools.wraps(stock_save)
    def save_checkpoint(*args: Any, **options: Any) -> None:
        if not adapter.session.is_leader:
            adapter.at("save")
        adapter.session.by_leader(lambda: stock_save(*args, **options), check=False)

    @functools.wraps(stock_write)
    def write(*args: Any, **options: Any) -> Any:
        result = stock_write(*args, **options)
        # The shards are on disk, latest_checkpointed_iteration.txt does not name them yet.
        adapter.at("save")
        return result

    training.save_checkpoint = save_checkpoint
    checkpointing.dist_checkpointing.save = write


def save_now(adapter: Adapter, iteration: int) -> bool:
    """Saves the state after ``iteration`` committed iterations, if --save is set. Returns whether it was."""
    from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
    from megatron.training import get_args, training

    if not get_args().save or adapter.optimizer is None:
        return False
    # The machine's state goes into the checkpoint: it must say "between iterations", although we are inside one.
    machine = get_rerun_state_machine()
    machine.state, machine.current_iteration = RerunState.NOT_RUNNING_YET, iteration
    training.save_checkpoint_and_time(
        iteration,
        adapter.model,
        adapter.optimizer,
        adapter.scheduler,
        adapter.floating_point_operations,
        {},
    )
    return True
