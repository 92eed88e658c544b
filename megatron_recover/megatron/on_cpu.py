"""What has to change in Megatron itself on the CPU, beside the flags in ``cpu_flags``."""

from __future__ import annotations

import copy
import functools
from typing import Any


def install() -> None:
    """Install both changes below. Imports Megatron, so the device must be installed first."""
    _allow_sequence_parallel_norms()
    _skip_warm_up()


def _allow_sequence_parallel_norms() -> None:
    """Let ``--sequence-parallel`` run without Apex and Transformer Engine.

    Megatron refuses torch's own norms there, because nothing marks their parameters. With the mark that its other
    norms set, Megatron sums their gradients over the tensor-parallel group, and the run is the one without sequence
    parallelism.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    build = WrappedTorchNorm.__new__
    if getattr(build, "marks_parameters", False):
        return

    @functools.wraps(build)
    def build_and_mark(cls: type, config: Any, *args: Any, **options: Any) -> Any:
        if not config.sequence_parallel:
            return build(cls, config, *args, **options)
        accepted = copy.copy(config)
        accepted.sequence_parallel = False
        norm = build(cls, accepted, *args, **options)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    build_and_mark.marks_parameters = True  # type: ignore[attr-defined]
    WrappedTorchNorm.__new__ = build_and_mark


def _skip_warm_up() -> None:
    """Skip the calls that make the compiler compile, as nothing is compiled.

    Their random input would also come from the generator that the weights are drawn from next (a CPU has only one),
    so that the weights would depend on the tensor-parallel size.
    """
    from megatron.training import initialize

    initialize._warmup_jit_function = lambda *args, **options: None
