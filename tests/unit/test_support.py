"""What --recover refuses: each row works, is documented, and names attributes that Megatron has."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron_recover.errors import UserError
from megatron_recover.megatron import cpu_flags
from megatron_recover.megatron.refusals import REFUSALS, Refusal
from megatron_recover.megatron.support import as_table, check_supported

PAGE = Path(__file__).parents[2] / "docs" / "support.md"


def test_page_has_every_row() -> None:
    assert as_table() in PAGE.read_text()


def test_page_has_the_flags_of_the_cpu() -> None:
    page = PAGE.read_text()
    for flag, _, value in cpu_flags.DEFAULTS:
        assert f"`{cpu_flags.as_written(flag, value)}`" in page
    for flag, _, _ in cpu_flags.REFUSED:
        assert f"`{flag}`" in page


def test_every_attribute_is_one_of_megatron(megatron_arguments: dict[str, object]) -> None:
    attributes = {attribute for row in REFUSALS for attribute in row.attributes}
    attributes |= {attribute for _, attribute, _ in cpu_flags.DEFAULTS}
    assert attributes <= megatron_arguments.keys()


def test_megatrons_defaults_are_supported(megatron_arguments: dict[str, object]) -> None:
    check_supported(argparse.Namespace(**megatron_arguments))


def test_unknown_attributes_do_not_matter() -> None:
    check_supported(argparse.Namespace())


ON: dict[str, dict[str, object]] = {
    "--dataloader-type cyclic or external": {"dataloader_type": "cyclic"},
    "--phase-transition-iterations": {"phase_transition_iterations": [10]},
    "--num-distributed-optimizer-instances above 1": {"num_distributed_optimizer_instances": 2},
    "--tensor-parallel-num-weight-shards above the tensor-parallel size": {
        "tensor_parallel_num_weight_shards": 4,
        "tensor_model_parallel_size": 2,
    },
    "--expert-tensor-parallel-num-weight-shards above the expert tensor-parallel size": {
        "expert_tensor_parallel_num_weight_shards": 4,
        "tensor_model_parallel_size": 2,
    },
    "--expert-model-parallel-size beyond the replica": {
        "num_experts": 4,
        "expert_model_parallel_size": 4,
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "--moe-router-load-balancing-type global_aux_loss": {
        "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"]
    },
    "--moe-router-load-balancing-type quantile_balancing": {
        "moe_router_load_balancing_type": "quantile_balancing"
    },
    "--num-experts with interleaved pipeline stages": {
        "num_experts": 4,
        "virtual_pipeline_model_parallel_size": 2,
    },
    "--experimental-attention-variant dsa": {"experimental_attention_variant": "dsa"},
    "--fp8-format with --fp8-recipe delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "--optimizer dist_muon, or --use-distributed-optimizer with muon, adaptive_muon or soap": {
        "optimizer": "dist_muon"
    },
    "--cuda-graph-impl": {"cuda_graph_impl": "local"},
    "--async-save with --async-strategy nvrx": {"async_save": True, "async_strategy": "nvrx"},
}
"""What turns a row on, where it is more than its first attribute being 1."""


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.attributes[0])
def test_row_is_refused(row: Refusal, megatron_arguments: dict[str, object]) -> None:
    on = ON.get(row.flag, {row.attributes[0]: 1})
    with pytest.raises(UserError) as refused:
        check_supported(argparse.Namespace(**(megatron_arguments | on)))
    message = str(refused.value)
    assert message == f"{row.flag} cannot be used with --recover: {row.why}; {row.way_round}"
    assert "\n" not in message


def test_experts_inside_the_replica_are_supported() -> None:
    check_supported(
        argparse.Namespace(
            num_experts=4, expert_model_parallel_size=2, recover_shards=2, pipeline_model_parallel_size=2
        )
    )
    check_supported(
        argparse.Namespace(
            num_experts=4,
            expert_model_parallel_size=2,
            expert_tensor_parallel_size=1,
            tensor_model_parallel_size=2,
        )
    )
