"""Seam: a data loader that is addressed by microbatch.

Microbatch j of an iteration is the samples [consumed + (j * K + k) * size, + size) of the data set, for shard k
of K inside the replica: the same samples that vanilla Megatron's sequential sampler gives to it. So any replica
can fetch any microbatch, and nothing about the position in the data is lost with a rank.

With worker processes the loader reads ahead along the plan that holds if nobody is lost. What a repair makes
stale is dropped at the start of the next iteration; a microbatch taken over is fetched directly.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunDataIterator

from megatron_recover.errors import UserError
from megatron_recover.megatron.adapter import Adapter


def install(adapter: Adapter) -> None:
    """Replaces Megatron's pre-training data loader and the replaying iterator around it."""
    from megatron.core import mpu
    from megatron.core.datasets.utils import Split
    from megatron.training import get_args, training

    stock_wrap = training.RerunDataIterator

    def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> AddressedIterator | None:
        if dataset is None:
            return None
        args = get_args()
        split = getattr(dataset, "split", getattr(dataset, "index_split", None))
        size = args.eval_micro_batch_size if split in (Split.valid, Split.test) else args.micro_batch_size
        return AddressedIterator(
            adapter,
            dataset,
            first_sample=consumed_samples,
            micro_batch_size=size,
            shard=mpu.get_data_parallel_rank(),
            num_shards=mpu.get_data_parallel_world_size(),
            num_workers=args.num_workers,
        )

    def wrap(iterable: Any) -> Any:
        return iterable if isinstance(iterable, AddressedIterator) else stock_wrap(iterable)

    def dummy_train_step(data_iterator: Any) -> None:
        # --iterations-to-skip: samples are addressed, so passing over them is arithmetic.
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        for iterator in iterators_of(data_iterator):
            iterator.skip(get_num_microbatches())

    _refuse_empty_splits()
    training.build_pretraining_data_loader = build_pretraining_data_loader
    training.RerunDataIterator = wrap
    training.dummy_train_step = dummy_train_step


def _refuse_empty_splits() -> None:
    """Megatron looks for ever for samples in a split that got no document at all."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    stock = GPTDataset._get_num_epochs

    @functools.wraps(stock)
    def _get_num_epochs(self: Any, num_tokens_per_epoch: int) -> int:
        if num_tokens_per_epoch == 0:
            raise UserError(
                f"the {self.index_split.name} split of the data has no document: give it a share of 0 or a larger one "
                "with --split, for example --split 95,5,0."
            )
        return int(stock(self, num_tokens_per_epoch))

    GPTDataset._get_num_epochs = _get_num_epochs


def iterators_of(data_iterator: Any) -> list[AddressedIterator]:
    """The addressed iterators that a schedule was given (one a model chunk; none on inner ranks)."""
    candidates = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    return [one for one in candidates if isinstance(one, AddressedIterator)]


class AddressedIterator(RerunDataIterator):
    """Serves the microbatches of a plan by id. It holds no position but the first sample of the iteration.

    Args:
        adapter: for the plan that read-ahead follows.
        dataset: a map-style data set.
        first_sample: index of the first sample not consumed yet.
        micro_batch_size: samples in one unit on one shard.
        shard, num_shards: this rank's data-parallel place inside its replica.
        num_workers: worker processes; 0 fetches in the training process.
    """

    def __init__(
        self,
        adapter: Adapter,
        dataset: Any,
        *,
        first_sample: int,
        micro_batch_size: int,
        shard: int,
        num_shards: int,
        num_workers: int,
    ) -> None:
        super().__init__(self)
        self._adapter = adapter
        self._dataset = dataset
        self._first = first_sample
        self._size = micro_batch_size
        self._shard, self._num_shards = shard, num_shards
        self._total = 0
        self._units: collections.deque[int | None] = collections.deque()
        self._ahead = _ReadAhead(dataset, num_workers) if num_workers > 0 else None

    def __iter__(self) -> AddressedIterator:
        return self

    def begin(self, num_microbatches: int) -> None:
        """An iteration of ``num_microbatches`` units begins at the present position."""
        self._total = num_microbatches
        if self._ahead is not None:
            self._ahead.follow(self._expected_now())

    def serve(self, units: Sequence[int | None]) -> None:
        """The next calls of ``next`` return these microbatches; None is one of zero weight."""
        self._units = collections.deque(units)

    def end(self) -> None:
        """The iteration is committed: its samples are consumed."""
        self.skip(self._total)

    def skip(self, num_microbatches: int) -> None:
        """Passes over the samples of ``num_microbatches`` units."""
        self._first += num_microbatches * self._num_shards * self._size

    def __next__(self) -> Any:
        unit = self._units.popleft()
        samples = self._samples(0 if unit is None else unit, self._first)
        batch = None if self._ahead is None or unit is None else self._ahead.take(samples)
        if batch is None:
            batch = torch.utils.data.default_collate([self._dataset[index] for index in samples])
        if unit is None:
            batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
        return batch

    def _samples(self, unit: int, first: int) -> tuple[int, ...]:
        start = first + (unit * self._num_shards + self._shard) * self._size
        return tuple(range(start, start + self._size))

    def _expected_now(self) -> Iterator[tuple[int, ...]]:
        """Samples this rank will be asked for from here on, if nobody is lost."""
        session, first, total = self._adapter.session, self._first, self._total
        mine = session.policy.assign(total, session.alive).ids_of(session.replica)
        while mine and first + total * self._num_shards * self._size <= len(self._dataset):
            for unit in mine:
                yield self._samples(unit, first)
            first += total * self._num_shards * self._size

    # Megatron's rerun machine replays an iteration by rewinding; here it is addressed again by the plan.
    def rewind(self) -> None:
        self._first -= self._total * self._num_shards * self._size

    def advance(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class _ReadAhead:
    """Worker processes that fetch an expected sequence of microbatches before they are asked for."""

    def __init__(self, dataset: Any, num_workers: int) -> None:
        self._dataset = dataset
        self._num_workers = num_workers
        self._requested: collections.deque[tuple[int, ...]] = collections.deque()
        self._stream: Iterator[Any] | None = None

    def follow(self, expected: Iterator[tuple[int, ...]]) -> None:
        """From here on the microbatches will be asked for in this order."""
        first = next(expected, None)
        if first is None or (self._requested and self._requested[0] == first):
            return
        self._stream = None  # ends the workers of a plan that does not hold any more
        self._requested.clear()
        self._stream = iter(
            torch.utils.data.DataLoader(
                self._dataset,
                batch_sampler=_Sampler(first, expected, self._requested),
                num_workers=self._num_workers,
                pin_memory=not _on_cpu(),
            )
        )

    def take(self, samples: tuple[int, ...]) -> Any | None:
        """The batch of these samples if it is the next that was read ahead, else None."""
        if self._stream is None or not self._requested or self._requested[0] != samples:
            return None
        self._requested.popleft()
        return next(self._stream)


class _Sampler(torch.utils.data.Sampler[list[int]]):
    """Hands an expected sequence to a DataLoader and remembers what was asked of the workers."""

    def __init__(
        self,
        first: tuple[int, ...],
        rest: Iterator[tuple[int, ...]],
        requested: collections.deque[tuple[int, ...]],
    ) -> None:
        self._first, self._rest, self._requested = first, rest, requested

    def __iter__(self) -> Iterator[list[int]]:
        samples: tuple[int, ...] | None = self._first
        while samples is not None:
            self._requested.append(samples)
            yield list(samples)
            samples = next(self._rest, None)


@functools.cache
def _on_cpu() -> bool:
    from megatron_recover.devices import cpu

    return cpu.installed()
