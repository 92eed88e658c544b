"""Injected faults that change Megatron's state: a flipped bit in a parameter, a gradient that is NaN."""

from __future__ import annotations

from typing import Any

import torch

from megatron_recover.faults import FaultInjector


def offer(injector: FaultInjector, model: list[Any]) -> None:
    """Lets ``injector`` carry out kinds ``corrupt`` and ``nan`` on this rank's part of the model."""

    def corrupt() -> None:
        parameter = next(parameter for chunk in model for parameter in chunk.parameters())
        flip_a_bit(parameter)

    def nan() -> None:
        parameter = next(parameter for chunk in model for parameter in chunk.parameters() if parameter.requires_grad)
        with torch.no_grad():
            parameter.main_grad.view(-1)[0] = float("nan")

    injector.state_changers.update(corrupt=corrupt, nan=nan)


def flip_a_bit(tensor: torch.Tensor) -> None:
    """Flips the highest bit of the mantissa of the first element, as a memory fault would: the value stays finite."""
    bits = {2: (torch.int16, 6 if tensor.dtype == torch.bfloat16 else 9), 4: (torch.int32, 22), 8: (torch.int64, 51)}
    integer, bit = bits[tensor.element_size()]
    with torch.no_grad():
        view = tensor.detach().view(-1).view(integer)
        view[0] ^= 1 << bit
