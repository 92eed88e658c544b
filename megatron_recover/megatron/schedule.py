"""Seam: rounds and commit around Megatron's forward-backward schedules.

``training.get_forward_backward_func`` is asked for G microbatches. The function returned here runs the stock
schedule on this replica's share, round after round until the world has committed, and returns the losses of
all G microbatches in order. Megatron's own finalisation of gradients runs once, after the commit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_recover.megatron import gradients, statistics
from megatron_recover.megatron.adapter import Adapter
from megatron_recover.megatron.data import AddressedIterator, iterators_of
from megatron_recover.session import Iteration
from megatron_recover.workload import pad_to_schedule

TOKENS = "num_tokens"


def install(adapter: Adapter) -> None:
    """Replaces the name through which training and evaluation ask for a schedule."""
    from megatron.training import training

    stock = training.get_forward_backward_func

    @functools.wraps(stock)
    def get_forward_backward_func(*args: Any, **options: Any) -> Callable[..., Any]:
        return functools.partial(_forward_backward, adapter, stock(*args, **options))

    training.get_forward_backward_func = get_forward_backward_func


def _forward_backward(adapter: Adapter, run: Callable[..., Any], **call: Any) -> Any:
    """One iteration of training or evaluation; same signature and result as Megatron's schedules.

    Raises:
        TooFewReplicas, ReplicasDiffer: on all ranks together.
    """
    from megatron.training import get_args

    if call.get("collect_non_loss_data"):
        return run(**call)
    args = get_args()
    total = call["num_microbatches"]
    number = getattr(args, "curr_iteration", args.iteration) + 1
    adapter.model = call["model"] if isinstance(call["model"], list) else [call["model"]]
    iterators = iterators_of(call["data_iterator"])
    for iterator in iterators:
        iterator.begin(total)
    if call.get("forward_only"):
        iteration = adapter.session.iteration(number, total, phase="eval")
        _run_rounds(adapter, iteration, run, call, iterators)
    else:
        adapter.bucket_index, buckets = gradients.collect(adapter.model)
        buckets += statistics.buckets(adapter.model)
        iteration = adapter.session.iteration(number, total, buckets)
        config = _config(adapter.model)
        finalize = config.finalize_model_grads_func

        def record_tokens(model: Any, num_tokens: torch.Tensor | None = None, **options: Any) -> None:
            if num_tokens is not None:
                iteration.add(TOKENS, int(num_tokens))

        trackers = statistics.Trackers(iteration)
        config.finalize_model_grads_func = record_tokens
        try:
            _run_rounds(adapter, iteration, run, call, iterators, trackers)
        finally:
            config.finalize_model_grads_func = finalize
        trackers.committed()
        _finalize(finalize, adapter.model, config, call, iteration)
        adapter.at("optimizer")
    for iterator in iterators:
        iterator.end()
    return [
        {key: torch.tensor(value, dtype=torch.float32, device="cuda") for key, value in loss.items()}
        for loss in iteration.results
        if loss is not None
    ]


def _run_rounds(
    adapter: Adapter,
    iteration: Iteration,
    run: Callable[..., Any],
    call: dict[str, Any],
    iterators: list[AddressedIterator],
    trackers: statistics.Trackers | None = None,
) -> None:
    """Runs the stock schedule on this replica's units of each round, until the world has committed."""
    adapter.iteration, adapter.units_before = iteration, 0
    try:
        for current in iteration.rounds():
            if not current.ids:
                continue
            count = _units_for(len(current.ids), adapter.model)
            adapter.units = current.ids + (None,) * (count - len(current.ids))
            if iteration.phase == "train":
                gradients.open_round(adapter.model)
            for iterator in iterators:
                iterator.serve(adapter.units)
            losses = run(**{**call, "num_microbatches": count}) or []
            for microbatch, loss in zip(current.ids, losses, strict=False):
                iteration.record(microbatch, {key: value.detach().tolist() for key, value in loss.items()})
            if trackers is not None:
                trackers.round_done()
            adapter.units_before += len(current.ids)
    finally:
        adapter.iteration, adapter.units = None, ()


def _units_for(share: int, model: list[Any]) -> int:
    """Units the schedule must run for a share: interleaved pipelines do not take every number."""
    from megatron.core import parallel_state

    if len(model) == 1:
        return share
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    group = _config(model).microbatch_group_size_per_vp_stage or pipeline
    return pad_to_schedule(share, pipeline, group)


def _config(model: list[Any]) -> Any:
    from megatron.core.utils import get_model_config

    return get_model_config(model[0])


def _finalize(
    finalize: Callable[..., None], model: list[Any], config: Any, call: dict[str, Any], iteration: Iteration
) -> None:
    """Megatron's own finalisation, as its schedule would have called it after all G microbatches."""
    from megatron.core.pipeline_parallel import schedules

    tokens = None
    if config.calculate_per_token_loss:
        tokens = torch.tensor(int(iteration.sums.get(TOKENS, 0)), dtype=torch.int, device="cuda")
    finalize(
        model,
        tokens,
        pg_collection=call.get("pg_collection") or schedules._build_default_pg_collection(),
        force_all_reduce=call.get("force_all_reduce", False),
    )
