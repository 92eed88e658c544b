"""The values that Megatron's flags must have on a CPU (``--recover-device cpu``)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_recover.errors import UserError

DEFAULTS: tuple[tuple[str, str, Any], ...] = (
    ("--transformer-impl", "transformer_impl", "local"),
    ("--distributed-backend", "distributed_backend", "gloo"),
    ("--disable-gloo-process-groups", "use_gloo_process_groups", False),
    ("--use-cpu-initialization", "use_cpu_initialization", True),
    ("--no-persist-layer-norm", "no_persist_layer_norm", True),
    ("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", False),
    ("--no-masked-softmax-fusion", "masked_softmax_fusion", False),
    ("--no-bias-gelu-fusion", "bias_gelu_fusion", False),
    ("--no-bias-swiglu-fusion", "bias_swiglu_fusion", False),
    ("--no-bias-dropout-fusion", "bias_dropout_fusion", False),
    ("--no-rope-fusion", "apply_rope_fusion", False),
)
"""(flag, attribute, value) of what is set for the user."""


def as_written(flag: str, value: Any) -> str:
    """The flag as one would write it on a command line: switches have no value."""
    return flag if isinstance(value, bool) else f"{flag} {value}"


REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("--context-parallel-size", lambda args: args.context_parallel_size > 1, "leave it out"),
    ("--fp8-format", lambda args: args.fp8 is not None, "use --bf16 or leave it out"),
    ("--fp4-format", lambda args: args.fp4 is not None, "use --bf16 or leave it out"),
    ("--tp-comm-overlap", lambda args: args.tp_comm_overlap, "leave it out"),
    ("--cuda-graph-impl", lambda args: args.cuda_graph_impl != "none", "leave it out"),
    ("--moe-grouped-gemm", lambda args: args.moe_grouped_gemm, "leave it out"),
    ("--use-flash-attn", lambda args: args.use_flash_attn, "leave it out"),
)
"""(flag, predicate on the parsed arguments, way round) of what needs a GPU library."""


def set_defaults(parser: argparse.ArgumentParser) -> None:
    """Make the values in ``DEFAULTS`` the defaults of Megatron's parser."""
    parser.set_defaults(**{attribute: value for _, attribute, value in DEFAULTS})


def check(args: argparse.Namespace) -> None:
    """Refuse flags that were given and cannot work on a CPU.

    Raises:
        UserError: names the flag and the way round.
    """
    for flag, attribute, value in DEFAULTS:
        # A flag of a newer Megatron that is gone cannot contradict anything.
        given = getattr(args, attribute, value)
        if given != value:
            given_text = "" if isinstance(given, bool) else f" {given}"
            raise UserError(
                f"{flag}{given_text} cannot run with --recover-device cpu: leave it out "
                f"(`{as_written(flag, value)}` is what a CPU needs, and is set there), or run on a GPU"
            )
    for flag, is_given, way_round in REFUSED:
        try:
            refused = is_given(args)
        except AttributeError:
            refused = False
        if refused:
            raise UserError(
                f"{flag} needs a GPU and cannot run with --recover-device cpu: {way_round}, or run on a GPU"
            )
