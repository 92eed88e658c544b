"""Seam: the sum over replicas comes before Megatron's own gradient synchronisation.

``_ParamAndGradBucketGroup.start_grad_sync`` scales and reduces in place, so it cannot be repeated. During the
rounds it only says that the raw bucket is ready; the engine sums it into another buffer. After the commit the
sums stand in the buckets and the stock path runs once, on the replica's own group.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_recover.errors import UserError
from megatron_recover.megatron.adapter import Adapter
from megatron_recover.recovery import Bucket


def install(adapter: Adapter) -> None:
    """Replaces the gradient synchronisation of Megatron's bucket groups."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup

    stock_start, stock_finish = BucketGroup.start_grad_sync, BucketGroup.finish_grad_sync

    @functools.wraps(stock_start)
    def start_grad_sync(self: Any, force_all_reduce: bool | None = False) -> None:
        if adapter.iteration is None:
            stock_start(self, force_all_reduce)
            return
        for bucket in self.buckets:
            adapter.iteration.bucket_ready(adapter.bucket_index[bucket])

    @functools.wraps(stock_finish)
    def finish_grad_sync(self: Any, force_all_reduce: bool | None = False) -> None:
        if adapter.iteration is not None:
            return
        if self.ddp_config.overlap_grad_reduce and not self.grad_reduce_finished and self.grad_reduce_handle is None:
            stock_start(self, force_all_reduce)  # the hooks of the rounds did not
        stock_finish(self, force_all_reduce)

    BucketGroup.start_grad_sync = start_grad_sync
    BucketGroup.finish_grad_sync = finish_grad_sync


def _bucket_groups(model: list[Any]) -> list[Any]:
    """All bucket groups in the order in which backward finishes them: last chunk first."""
    groups = []
    for chunk in reversed(model):
        if not hasattr(chunk, "bucket_groups"):
            raise UserError(
                f"--recover needs Megatron's DistributedDataParallel, not {type(chunk).__name__}: "
                "leave out --use-megatron-fsdp and --use-torch-fsdp2 in this version."
            )
        groups += [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    return groups


def collect(model: list[Any]) -> tuple[dict[Any, int], list[Bucket]]:
    """Megatron's buckets as ours, and the index of each.

    Raises:
        UserError: some parameters keep gradients outside the buckets.
    """
    index: dict[Any, int] = {}
    buckets: list[Bucket] = []
    for number, group in enumerate(_bucket_groups(model)):
        for bucket in group.buckets:
            if getattr(bucket, "params_with_extra_main_grads", None):
                raise UserError(
                    "--recover does not support gradients that are accumulated outside the gradient buffer: "
                    "use --accumulate-allreduce-grads-in-fp32 instead of a separate main gradient."
                )
            index[bucket] = len(buckets)
            buckets.append(Bucket(f"group {number} bucket {bucket.bucket_id}", bucket.grad_data))
    return index, buckets


def open_round(model: list[Any]) -> None:
    """Lets the hooks of this round's last microbatch count from zero again."""
    for group in _bucket_groups(model):
        group.per_param_grad_ready_counts = {}
