"""Seam: what happens around each forward and backward step of a unit (a microbatch in a schedule).

- the loss weighs 1/G wherever a microbatch runs, whatever this replica's share is;
- random numbers depend on (seed, iteration, microbatch, coordinate), so dropout is the same wherever it runs;
- failure injection and the flight recorder learn where this rank is.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_recover.megatron.adapter import Adapter

_NUM_MICROBATCHES = 6
"""Position of num_microbatches among forward_step_calc_loss's arguments."""


def install(adapter: Adapter) -> None:
    """Wraps the step functions that all schedules look up in their module."""
    from megatron.core.pipeline_parallel import schedules

    stock_forward = schedules.forward_step
    stock_loss = schedules.forward_step_calc_loss
    stock_backward = schedules.backward_step

    @functools.wraps(stock_forward)
    def forward_step(*args: Any, **options: Any) -> Any:
        if adapter.iteration is not None:
            position = options.get("current_microbatch")
            adapter.position = 0 if position is None else position
            phase = "data" if adapter.iteration.phase == "train" else "eval"
            adapter.at(phase, adapter.units_before + adapter.position)
            if adapter.iteration.phase == "train":
                unit = adapter.units[adapter.position]
                reseed(adapter.iteration.number, -1 if unit is None else unit)
        return stock_forward(*args, **options)

    @functools.wraps(stock_loss)
    def forward_step_calc_loss(*args: Any, **options: Any) -> Any:
        if adapter.iteration is not None:
            if adapter.iteration.phase == "train":
                adapter.at("forward", adapter.units_before + adapter.position)
            total = adapter.iteration.num_microbatches
            if "num_microbatches" in options:
                options["num_microbatches"] = total
            else:
                args = (*args[:_NUM_MICROBATCHES], total, *args[_NUM_MICROBATCHES + 1 :])
        return stock_loss(*args, **options)

    steps_back = _Counter()

    @functools.wraps(stock_backward)
    def backward_step(*args: Any, **options: Any) -> Any:
        if adapter.iteration is not None:
            adapter.at("backward", steps_back.next(adapter.iteration))
        return stock_backward(*args, **options)

    schedules.forward_step = forward_step
    schedules.forward_step_calc_loss = forward_step_calc_loss
    schedules.backward_step = backward_step


class _Counter:
    """Counts calls within an iteration."""

    def __init__(self) -> None:
        self._of: object = None
        self._count = 0

    def next(self, of: object) -> int:
        if self._of is not of:
            self._of, self._count = of, 0
        self._count += 1
        return self._count - 1


def reseed(iteration: int, microbatch: int) -> None:
    """Seeds all generators of this rank for one microbatch.

    Ranks of a tensor-parallel group get the same default stream and different model-parallel streams, and
    pipeline stages different ones, by the rules that Megatron itself seeds with at start.
    """
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.training import get_args

    seed = mix(get_args().seed, iteration, microbatch) + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def mix(*numbers: int) -> int:
    """A 31-bit seed from a few integers (splitmix64 steps), so that near inputs give unrelated streams."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & 0xFFFFFFFFFFFFFFFF)) & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & 0x7FFFFFFF
