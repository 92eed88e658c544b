"""What ``--recover`` refuses: whatever Megatron does across data-parallel ranks that is not handled yet.

One row per feature; ``docs/support.md`` shows the same rows, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """A feature of Megatron that cannot run with ``--recover``."""

    flag: str
    """As the user writes it, with the value where only some are refused."""
    attributes: tuple[str, ...]
    """Attributes of the parsed arguments that tell whether it is on."""
    is_on: Callable[..., bool]
    """Takes the values of the attributes, None for one that this Megatron does not have."""
    why: str
    way_round: str

    def __str__(self) -> str:
        return f"{self.flag} cannot be used with --recover: {self.why}; {self.way_round}"


def _given(*values: Any) -> bool:
    return any(bool(value) for value in values)


def _set(*values: Any) -> bool:
    return any(value is not None for value in values)


def _is(*refused: str) -> Callable[[Any], bool]:
    """The value, or one of a list of values, is one of ``refused``."""
    return lambda value: bool({*refused} & {*(value if isinstance(value, list) else [value])})


def _expert_groups_leave_replica(
    num_experts: Any, expert: Any, expert_tensor: Any, tensor: Any, pipeline: Any, context: Any, shards: Any
) -> bool:
    if not num_experts:
        return False
    replica = (tensor or 1) * (pipeline or 1) * (context or 1) * (shards or 1)
    return replica % ((expert or 1) * (expert_tensor or tensor or 1) * (pipeline or 1)) != 0


LEAVE_OUT = "leave it out"

REFUSALS: tuple[Refusal, ...] = (
    # data
    Refusal(
        "--dataloader-type cyclic or external",
        ("dataloader_type",),
        _is("cyclic", "external"),
        "a microbatch that is taken over is found again by its place in the sequence of samples",
        "use --dataloader-type single, the default",
    ),
    Refusal(
        "--full-validation",
        ("full_validation",),
        _given,
        "its number of steps depends on the data-parallel size",
        "give --eval-iters instead",
    ),
    Refusal(
        "--multiple-validation-sets",
        ("multiple_validation_sets",),
        _given,
        "the microbatches of only one validation set are shared out",
        "use one blended validation set",
    ),
    Refusal(
        "--phase-transition-iterations",
        ("phase_transition_iterations",),
        _given,
        "the data sets are built again in the middle of the run",
        "start a new run from the checkpoint of each phase",
    ),
    Refusal(
        "--sft",
        ("sft",),
        _given,
        "packed sequences differ in length, and their statistics are not summed over replicas",
        "leave it out and pre-train on sequences of one length",
    ),
    Refusal(
        "--dataloader-inter-document-masking",
        ("dataloader_inter_document_masking",),
        _given,
        "its sequence-length statistics are not summed over replicas",
        "use --reset-attention-mask instead",
    ),
    Refusal(
        "--logits-save-dir or --logits-load-dir",
        ("logits_save_dir", "logits_load_dir"),
        _set,
        "stored logits are matched to microbatches by the order in which a rank runs them",
        LEAVE_OUT,
    ),
    # batch size
    Refusal(
        "--decrease-batch-size-if-needed",
        ("decrease_batch_size_if_needed",),
        _given,
        "every iteration must keep all its microbatches, whatever the number of replicas",
        "leave it out: the global batch size need not be a multiple of the number of replicas",
    ),
    # parallelism
    Refusal(
        "--hybrid-context-parallel",
        ("hybrid_context_parallel",),
        _given,
        "it moves sequences between data-parallel ranks in every iteration",
        "use --context-parallel-size",
    ),
    Refusal(
        "--use-megatron-fsdp",
        ("use_megatron_fsdp",),
        _given,
        "it is not connected yet",
        "use --recover-shards K with --use-distributed-optimizer",
    ),
    Refusal(
        "--use-torch-fsdp2",
        ("use_torch_fsdp2",),
        _given,
        "it is not connected yet",
        "use --recover-shards K with --use-distributed-optimizer",
    ),
    Refusal(
        "--num-distributed-optimizer-instances above 1",
        ("num_distributed_optimizer_instances",),
        lambda instances: (instances or 1) > 1,
        "a replica is one instance already",
        "give --recover-shards K for K ranks in each",
    ),
    Refusal(
        "--tensor-parallel-num-weight-shards above the tensor-parallel size",
        ("tensor_parallel_num_weight_shards", "tensor_model_parallel_size"),
        lambda shards, tensor: (shards or 0) > (tensor or 1),
        "weights would be sharded over ranks that are not counted into a replica",
        LEAVE_OUT,
    ),
    Refusal(
        "--expert-tensor-parallel-num-weight-shards above the expert tensor-parallel size",
        (
            "expert_tensor_parallel_num_weight_shards",
            "expert_tensor_parallel_size",
            "tensor_model_parallel_size",
        ),
        lambda shards, expert_tensor, tensor: (shards or 0) > (expert_tensor or tensor or 1),
        "weights would be sharded over ranks that are not counted into a replica",
        LEAVE_OUT,
    ),
    Refusal(
        "--expert-model-parallel-size beyond the replica",
        (
            "num_experts",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "recover_shards",
        ),
        _expert_groups_leave_replica,
        "all experts of a layer must be inside one replica",
        "lower it, or give --recover-shards K so that TP x CP x K is a multiple of it (times the expert "
        "tensor size)",
    ),
    Refusal(
        "--fake-process-group",
        ("fake_process_group",),
        _given,
        "nothing is communicated inside a replica then",
        LEAVE_OUT,
    ),
    # mixture of experts and other layers
    Refusal(
        "--moe-router-load-balancing-type global_aux_loss",
        ("moe_router_load_balancing_type",),
        _is("global_aux_loss"),
        "it sums over all data-parallel ranks inside the forward pass",
        "use seq_aux_loss or aux_loss",
    ),
    Refusal(
        "--moe-router-load-balancing-type quantile_balancing",
        ("moe_router_load_balancing_type",),
        _is("quantile_balancing"),
        "its statistics are not averaged over replicas yet",
        "use aux_loss, or --moe-router-enable-expert-bias",
    ),
    Refusal(
        "--moe-expert-rank-capacity-factor or --moe-paged-stash",
        ("moe_expert_rank_capacity_factor", "moe_paged_stash"),
        _given,
        "it runs an iteration again by a decision of all ranks",
        "use --moe-expert-capacity-factor",
    ),
    Refusal(
        "--moe-routing-trace-path",
        ("moe_routing_trace_path",),
        _set,
        "all replicas would write the same files",
        LEAVE_OUT,
    ),
    Refusal(
        "--num-experts with interleaved pipeline stages",
        ("num_experts", "virtual_pipeline_model_parallel_size"),
        lambda num_experts, virtual: bool(num_experts) and bool(virtual) and virtual > 1,
        "shares are padded to what that schedule takes, and the padding would count in the router's statistics",
        "use one pipeline stage per rank (leave --num-virtual-stages-per-pipeline-rank out)",
    ),
    Refusal(
        "--mtp-num-layers",
        ("mtp_num_layers",),
        _given,
        "its losses are not summed over replicas yet",
        LEAVE_OUT,
    ),
    Refusal(
        "--experimental-attention-variant dsa",
        ("experimental_attention_variant",),
        _is("dsa"),
        "the losses of its indexer are not summed over replicas yet",
        LEAVE_OUT,
    ),
    # precision and optimizer
    Refusal(
        "--fp8-format with --fp8-recipe delayed",
        ("fp8", "fp8_recipe"),
        lambda fp8, recipe: bool(fp8) and recipe == "delayed",
        "its scaling factors are maxima over all data-parallel ranks",
        "use --fp8-recipe tensorwise, blockwise or mxfp8",
    ),
    Refusal(
        "--qk-clip or --log-max-attention-logit",
        ("qk_clip", "log_max_attention_logit"),
        _given,
        "attention maxima are not compared across replicas, which would then clip different weights",
        LEAVE_OUT,
    ),
    Refusal(
        "--optimizer dist_muon, or --use-distributed-optimizer with muon, adaptive_muon or soap",
        ("optimizer", "use_distributed_optimizer", "use_layer_wise_distributed_optimizer"),
        lambda optimizer, shard, layer_wise: (
            bool(layer_wise)
            or optimizer == "dist_muon"
            or (bool(shard) and optimizer in ("muon", "adaptive_muon", "soap"))
        ),
        "the layer-wise optimizer is not tested",
        "leave --use-distributed-optimizer out, or use --optimizer adam",
    ),
    Refusal(
        "--data-parallel-random-init",
        ("data_parallel_random_init",),
        _given,
        "all replicas start from the same random numbers",
        LEAVE_OUT,
    ),
    Refusal(
        "--delay-wgrad-compute",
        ("delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad"),
        _given,
        "a gradient could be reduced before it is complete",
        LEAVE_OUT,
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        ("overlap_moe_expert_parallel_comm",),
        _given,
        "its combined forward and backward steps are not connected yet",
        LEAVE_OUT,
    ),
    Refusal(
        "--cuda-graph-impl",
        ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
        lambda implementation, *deprecated: implementation not in (None, "none") or _given(*deprecated),
        "a recorded iteration cannot be given other microbatches",
        LEAVE_OUT,
    ),
    Refusal(
        "--optimizer-cuda-graph",
        ("optimizer_cuda_graph",),
        _given,
        "a recorded step cannot be left out",
        LEAVE_OUT,
    ),
    # checkpoints and dumps
    Refusal(
        "--async-save with --async-strategy nvrx",
        ("async_save", "async_strategy"),
        lambda background, strategy: bool(background) and strategy == "nvrx",
        "its writing processes outlive a rank that is lost",
        "add --async-strategy mcore, which then writes on a thread",
    ),
    Refusal(
        "--non-persistent-save-interval or --non-persistent-ckpt-type",
        ("non_persistent_save_interval", "non_persistent_ckpt_type"),
        _set,
        "only the leader saves, and a local copy would be lost with it",
        "use --save and --save-interval",
    ),
    Refusal(
        "--ckpt-convert-format",
        ("ckpt_convert_format",),
        _set,
        "it ends the process after writing",
        "convert without --recover",
    ),
    Refusal(
        "--save-params-interval, --save-wgrads-interval, --save-dgrads-interval, "
        "--save-activations-interval or --save-tokens-per-expert-interval",
        (
            "save_params_interval",
            "save_wgrads_interval",
            "save_dgrads_interval",
            "save_activations_interval",
            "save_tokens_per_expert_interval",
        ),
        _set,
        "all replicas would write the same files",
        "debug without --recover",
    ),
    # watching and restarting
    Refusal(
        "--check-weight-hash-across-dp-replicas-interval",
        ("check_weight_hash_across_dp_replicas_interval",),
        _set,
        "Megatron sees only one replica",
        "use --recover-check-replicas-interval",
    ),
    Refusal(
        "--log-straggler",
        ("log_straggler",),
        _given,
        "the control ports of the replicas would collide",
        LEAVE_OUT,
    ),
    Refusal(
        "--run-workload-inspector-server",
        ("run_workload_inspector_server",),
        _given,
        "the ports of the replicas would collide",
        LEAVE_OUT,
    ),
    Refusal(
        "--log-energy",
        ("log_energy",),
        _given,
        "energy is not summed over replicas",
        LEAVE_OUT,
    ),
    Refusal(
        "--adlr-autoresume",
        ("adlr_autoresume",),
        _given,
        "replicas could decide to stop in different iterations",
        "use --exit-signal-handler or --exit-duration-in-mins",
    ),
    Refusal(
        "--inprocess-restart",
        ("inprocess_restart",),
        _given,
        "it restarts all ranks when one is lost",
        LEAVE_OUT,
    ),
    Refusal(
        "--enable-ft-package or --calc-ft-timeouts",
        ("enable_ft_package", "calc_ft_timeouts"),
        _given,
        "its monitor restarts all ranks when one is lost",
        LEAVE_OUT,
    ),
    Refusal(
        "--fault-injector-ranks, --fault-injector-num-ranks or --fault-injector-mtti-seconds",
        ("fault_injector_ranks", "fault_injector_num_ranks", "fault_injector_mtti_seconds"),
        _set,
        "its ranks are those inside one replica",
        "use --recover-inject",
    ),
    Refusal(
        "--perform-rl-step",
        ("perform_rl_step",),
        _given,
        "reinforcement learning has a loop of its own",
        LEAVE_OUT,
    ),
)
