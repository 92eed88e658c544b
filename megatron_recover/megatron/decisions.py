"""Seam: decisions by clock, signal or result validation are OR-ed over replicas.

Each agreement of the session carries what every rank would decide; Megatron then reads the agreed answer, so
all replicas leave, save or rerun in the same iteration.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from megatron_recover.megatron.adapter import Adapter

SIGNAL, DURATION = "exit signal", "exit duration"
RERUN, CONTINUE, CHECKPOINT, RESTART = "rerun", "rerun: continue", "rerun: checkpoint", "rerun: restart again"


def install(adapter: Adapter) -> None:
    """Replaces the places where Megatron decides for all ranks of (what it takes for) the job."""
    _exit_signal(adapter)
    _exit_duration(adapter)
    _rerun(adapter)


def _exit_signal(adapter: Adapter) -> None:
    from megatron.training import global_vars
    from megatron.training.dist_signal_handler import DistributedSignalHandler

    def received() -> bool:
        handler = global_vars._GLOBAL_SIGNAL_HANDLER
        return bool(handler is not None and getattr(handler, "_signal_received", False))

    adapter.session.vote(SIGNAL, received)

    def signals_received(self: Any) -> list[bool]:
        return [adapter.session.decisions[SIGNAL]]

    DistributedSignalHandler.signals_received = signals_received


def _exit_duration(adapter: Adapter) -> None:
    from megatron.training import get_args, training

    begin = time.time()

    def over() -> bool:
        from megatron.training.global_vars import _GLOBAL_ARGS as args

        limit: float | None = getattr(args, "exit_duration_in_mins", None)
        return limit is not None and time.time() - begin > limit * 60

    adapter.session.vote(DURATION, over)
    stock_decide, stock_evaluate = training.checkpoint_and_decide_exit, training.evaluate

    @functools.wraps(stock_decide)
    def checkpoint_and_decide_exit(*args: Any, **options: Any) -> Any:
        adapter.floating_point_operations = args[4] if len(args) > 4 else adapter.floating_point_operations
        settings = get_args()
        limit = settings.exit_duration_in_mins
        # Megatron compares with its own clock: it gets a limit that is over, or none.
        settings.exit_duration_in_mins = 1e-9 if adapter.session.decisions[DURATION] else None
        try:
            return stock_decide(*args, **options)
        finally:
            settings.exit_duration_in_mins = limit

    @functools.wraps(stock_evaluate)
    def evaluate(*args: Any, **options: Any) -> Any:
        settings = get_args()
        limit, settings.exit_duration_in_mins = settings.exit_duration_in_mins, None
        try:
            return stock_evaluate(*args, **options)
        finally:
            settings.exit_duration_in_mins = limit

    training.checkpoint_and_decide_exit = checkpoint_and_decide_exit
    training.evaluate = evaluate


def _rerun(adapter: Adapter) -> None:
    from megatron.core import rerun_state_machine
    from megatron.core.rerun_state_machine import RerunState, RerunStateMachine

    def asks(attribute: str) -> bool:
        machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
        return bool(getattr(machine, attribute, False))

    for name, attribute in (
        (RERUN, "rerun_requested"),
        (CONTINUE, "continue_requested"),
        (CHECKPOINT, "checkpoint_requested"),
        (RESTART, "restart_again_requested"),
    ):
        adapter.session.vote(name, functools.partial(asks, attribute))

    def _reduce_any(self: Any, value: bool | list[bool]) -> bool | tuple[bool, ...]:
        # What was requested was requested in the forward steps, so the commit has carried it already.
        agreed = adapter.session.decisions
        if not isinstance(value, list):
            return agreed[RERUN]
        if self.state == RerunState.RERUNNING_FROM_CHECKPOINT:
            return agreed[RESTART], agreed[CONTINUE]
        return agreed[CONTINUE], agreed[CHECKPOINT]

    RerunStateMachine._reduce_any = _reduce_any
