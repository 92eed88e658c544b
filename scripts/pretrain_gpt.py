"""Pre-train a GPT with Megatron's own training loop: GPUs or CPU, with --recover or without.

Takes all of Megatron's arguments; --help lists them, the --recover group among them. For example, on a
laptop:

    torchrun --nproc-per-node 2 scripts/pretrain_gpt.py --recover-device cpu --mock-data --tokenizer-type
    NullTokenizer \\
        --vocab-size 512 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \\
        --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 10 --lr 1e-3

and to survive lost replicas, start it with megatron-recover launch -n N -- scripts/pretrain_gpt.py ...
--recover instead. Without --recover this is vanilla Megatron.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

from megatron_recover.megatron import startup

if __name__ == "__main__":
    startup.start_script(sys.argv[1:])  # before torch and Megatron are imported

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_recover.errors import UserError

FIELDS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids", "cu_seqlens")
"""What a batch
has: each of shape [micro batch, sequence], the mask [micro batch, 1, sequence, sequence], or None."""

Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def get_batch(data_iterator: Iterator[dict[str, torch.Tensor]], vp_stage: int | None) -> dict[str, Any]:
    """The next microbatch: read by the first rank of each tensor-parallel group, broadcast, and cut for
    context ranks.

    Stages in the middle of the pipeline need none; all fields are None there.
    """
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(FIELDS)
    args = get_args()
    batch: dict[str, Any] = dict.fromkeys(FIELDS)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        read = next(data_iterator)
        batch |= {field: read[field].cuda(non_blocking=True) for field in FIELDS if field in read}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    on_this_rank: dict[str, Any] = get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )
    return on_this_rank


def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> Loss:
    """The loss of one microbatch.

    Args:
        loss_mask: 1 for tokens that count, 0 for others, [micro batch, sequence].
        losses: cross entropy per token in nats, of the same shape.

    Returns:
        The sum of the losses, the number of tokens that count (int), and what to log: both as one tensor [2],
        from which Megatron makes the mean over all tokens of the iteration.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for rejected, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"found {what} in local forward loss calculation",
                tolerance=0.0,  # running it again gives the same
                fatal=True,
            )
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module
) -> tuple[torch.Tensor, Any]:
    """Run the model on the next microbatch; returns its output (losses on the last stage) and the loss
    function."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, functools.partial(loss_func, batch["loss_mask"])


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build the train, validation and test sets, of at least ``num_samples`` each."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )

    def is_built_on_this_rank() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)

    print_rank_0("> building train, validation, and test datasets for GPT ...")
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    train, valid, test = BlendedMegatronDatasetBuilder(
        dataset, num_samples, is_built_on_this_rank, config
    ).build()
    return train, valid, test


build_datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank calls it, not tensor-parallel rank 0 alone


def main() -> None:
    """Parse Megatron's arguments and train."""
    args = parse_and_validate_args()
    for flag, given in (
        ("--mtp-num-layers", args.mtp_num_layers),
        ("--sft", args.sft),
        ("--fim-data", args.fim_data),
        ("--dataloader-inter-document-masking", args.dataloader_inter_document_masking),
        ("--logits-load-dir", args.logits_load_dir),
    ):
        if given:
            raise UserError(
                f"{flag} is not in this script: run pretrain_gpt.py of a Megatron-LM checkout instead"
            )
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    with startup.user_errors_end_the_process():
        main()
