"""What has to change in Megatron itself on the CPU, beside the flags in ``cpu_flags``."""

from __future__ import annotations

import copy
import functools
from typing import Any


def install() -> None:
    """Install the changes below. Imports Megatron, so the device must be installed first."""
    _allow_sequence_parallel_norms()
    _make_all_to_all_sizes_numbers()
    _let_distributed_optimizer_resume()
    _skip_warm_up()


def _allow_sequence_parallel_norms() -> None:
    """Let ``--sequence-parallel`` run without Apex and Transformer Engine.

    Megatron refuses torch's own norms there, because nothing marks their parameters. With the mark that its
    other norms set, Megatron sums their gradients over the tensor-parallel group, and the run is the one
    without sequence parallelism.
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


def _make_all_to_all_sizes_numbers() -> None:
    """Let ``--moe-token-dispatcher-type alltoall`` run, which makes numbers of sizes only on a GPU."""
    from megatron.core.transformer.moe import token_dispatcher

    move = token_dispatcher.maybe_move_tensor_to_cpu
    if getattr(move, "turns_all_into_numbers", False):
        return

    @functools.wraps(move)
    def move_and_turn(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = move(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and hasattr(moved, "numpy") else moved

    move_and_turn.turns_all_into_numbers = True  # type: ignore[attr-defined]
    token_dispatcher.maybe_move_tensor_to_cpu = move_and_turn


def _let_distributed_optimizer_resume() -> None:
    """Let a run with ``--use-distributed-optimizer`` load a checkpoint without Apex and Transformer Engine.

    With torch's own Adam, Megatron asks for the number of steps before there is one, writes float32
    parameters in place, and gives all parameters one step counter, or an old one, where each needs its own.
    """
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    sharded_state_dict, load_state_dict = (
        DistributedOptimizer.sharded_state_dict,
        DistributedOptimizer.load_state_dict,
    )
    if getattr(load_state_dict, "counts_steps_apart", False):
        return

    @functools.wraps(sharded_state_dict)
    def fill_and_return(self: Any, model_state: Any, is_loading: bool = False, **options: Any) -> Any:
        if is_loading and isinstance(self.optimizer, torch.optim.Adam) and not self.optimizer.state:
            self.init_state_fn(self.optimizer, self.config)
            for state in self.optimizer.state.values():
                state.setdefault("step", torch.zeros(()))  # replaced by what is loaded, as all of the state
        return sharded_state_dict(self, model_state, is_loading, **options)

    @functools.wraps(load_state_dict)
    def load_and_count_apart(self: Any, state_dict: Any) -> None:
        with torch.no_grad():
            load_state_dict(self, state_dict)
        if isinstance(self.optimizer, torch.optim.Adam):
            step = float(state_dict["optimizer"]["param_groups"][0]["step"])
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(step)

    load_and_count_apart.counts_steps_apart = True  # type: ignore[attr-defined]
    DistributedOptimizer.sharded_state_dict = fill_and_return
    DistributedOptimizer.load_state_dict = load_and_count_apart


def _skip_warm_up() -> None:
    """Skip the calls that make the compiler compile, as nothing is compiled.

    Their random input would also come from the generator that the weights are drawn from next (a CPU has only
    one), so that the weights would depend on the tensor-parallel size.
    """
    from megatron.training import initialize

    initialize._warmup_jit_function = lambda *args, **options: None
