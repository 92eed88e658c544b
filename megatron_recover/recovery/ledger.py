"""Bucket ledger: local gradient = snapshot, reduced result, epoch, commit.

A bucket's local gradient is never written between the first microbatch of an iteration and its commit: the
sum over replicas goes into a buffer of its own. So after a failure nothing has to be restored: the lost
microbatches are added to the local gradients by another round, and every bucket is reduced again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_recover.collectives.engine import Engine, Reduction

if TYPE_CHECKING:
    import torch

_NARROW = ("torch.bfloat16", "torch.float16", "float16")
"""Types that MPI cannot add, or that would lose bits on the way: reduced in float32."""


@dataclass(eq=False)
class Bucket:
    """A tensor or numpy array that is to be summed over replicas.

    Args:
        name: for messages.
        local: this rank's own sum over its microbatches, contiguous, any shape; a tensor on CPU or GPU, or an array.
    """

    name: str
    local: torch.Tensor | NDArray[Any]

    def __post_init__(self) -> None:
        local = self.local
        if not (local.flags.c_contiguous if isinstance(local, np.ndarray) else local.is_contiguous()):
            raise ValueError(f"bucket {self.name} is not contiguous, so it cannot be reduced without a copy")

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.local.size if isinstance(self.local, np.ndarray) else self.local.numel()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type in which it is reduced."""
        name = str(self.local.dtype)
        return np.dtype("float32" if name in _NARROW else name.removeprefix("torch."))

    def flat(self) -> NDArray[Any]:
        """All elements as MPI sees them; no copy when they are on the CPU in a type that MPI can add."""
        local = self.local
        if isinstance(local, np.ndarray):
            return local.reshape(-1).astype(self.dtype, copy=False)
        import torch

        return local.detach().reshape(-1).to(device="cpu", dtype=getattr(torch, self.dtype.name)).numpy()

    def fill(self, values: NDArray[Any]) -> None:
        """Replaces all elements."""
        local = self.local
        if isinstance(local, np.ndarray):
            local.reshape(-1)[:] = values
        else:
            import torch

            with torch.no_grad():
                local.view(-1).copy_(torch.from_numpy(values))

    def clear(self) -> None:
        """Sets all elements to zero."""
        if isinstance(self.local, np.ndarray):
            self.local[...] = 0
        else:
            self.local.zero_()


class _Entry:
    """A bucket's result buffer and its reduction in the current round."""

    def __init__(self, bucket: Bucket, check_finite: bool) -> None:
        self.bucket = bucket
        self.check_finite = check_finite
        self.is_finite = True
        self.result: NDArray[Any] | None = None
        self.is_ready = False
        self.done: Future[bool] | None = None

    def send(self) -> NDArray[Any]:
        """The local gradient; looked through for NaN and Inf on the way."""
        flat = self.bucket.flat()
        if self.check_finite:
            self.is_finite = is_finite(flat)
        return flat

    def receive(self) -> NDArray[Any]:
        if self.result is None:
            self.result = np.empty(self.bucket.size, self.bucket.dtype)
        return self.result


def is_finite(flat: NDArray[Any]) -> bool:
    """Whether no element is NaN or Inf. One pass, without a copy, unless there is reason to look closer."""
    if flat.dtype.kind != "f":
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(flat, flat))) or bool(np.isfinite(flat).all())


class BucketLedger:
    """The buckets of one iteration, in the order in which they are reduced on every replica.

    Args:
        engine: layer 1.
        buckets: in the order in which backward finishes them (a bucket is handed to the engine when it
            and all before it are ready, so that the order is the same on every replica).
        on_reduce: ``on_reduce(index)`` is called on the engine thread just before a bucket is reduced.
        buffers: result buffers that the last iteration has left, by index; this one leaves its own at the commit.
        check_finite: look for NaN and Inf in each bucket before it is reduced.
    """

    def __init__(
        self,
        engine: Engine,
        buckets: Sequence[Bucket],
        on_reduce: Callable[[int], None] | None = None,
        buffers: dict[int, NDArray[Any]] | None = None,
        *,
        check_finite: bool = False,
    ) -> None:
        self._engine = engine
        self._buffers = {} if buffers is None else buffers
        self._entries = [_Entry(bucket, check_finite) for bucket in buckets]
        for index, entry in enumerate(self._entries):
            left = self._buffers.pop(index, None)
            if left is not None and (left.size, left.dtype) == (entry.bucket.size, entry.bucket.dtype):
                entry.result = left
        self._on_reduce = on_reduce
        self._epoch = 0
        self._next = 0
        self._is_open = True
        self._graveyard: list[NDArray[Any]] = []
        self.early = 0
        """Buckets that were handed over before their round ended, in all rounds together."""

    @property
    def not_finite(self) -> list[str]:
        """Buckets in which the last reduction saw NaN or Inf on this rank."""
        return [entry.bucket.name for entry in self._entries if not entry.is_finite]

    def not_finite_now(self) -> list[str]:
        """Buckets that hold NaN or Inf now."""
        for entry in self._entries:
            entry.send()
        return self.not_finite

    def clear(self) -> None:
        """Sets all local gradients to zero; from here on nothing is reduced any more (they are lost)."""
        self._is_open = False
        for entry in self._entries:
            entry.bucket.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def open_round(self, epoch: int) -> None:
        """Begins a round: no bucket is ready. Results of a round before are void."""
        self._epoch = epoch
        self._next = 0
        for entry in self._entries:
            if entry.done is not None and not entry.done.result():
                # A peer that has not heard of the revocation may still write into the old buffer.
                if entry.result is not None:
                    self._graveyard.append(entry.result)
                entry.result = None
            entry.is_ready, entry.done = False, None

    def ready(self, index: int) -> None:
        """The local gradient of bucket ``index`` is final for this round; its reduction may begin."""
        if not self._is_open:
            return
        self._mark_ready(index)
        self.early += 1

    def _mark_ready(self, index: int) -> None:
        self._entries[index].is_ready = True
        while self._next < len(self._entries) and self._entries[self._next].is_ready:
            self._submit(self._next)
            self._next += 1

    def _submit(self, index: int) -> None:
        entry = self._entries[index]
        task = Reduction(entry.send, entry.receive())
        if self._on_reduce is not None:
            on_reduce = self._on_reduce
            task.before = lambda: on_reduce(index)
        entry.done = self._engine.all_reduce(task, self._epoch)

    def close_round(self) -> None:
        """Hands over every bucket that was not ready before."""
        for index, entry in enumerate(self._entries):
            if not entry.is_ready:
                self._mark_ready(index)

    def wait_for(self, index: int, timeout_s: float) -> bool:
        """Waits for one bucket that was handed over. False: the epoch is gone.

        Raises:
            TimeoutError: not within ``timeout_s`` seconds.
        """
        done = self._entries[index].done
        if done is None:
            raise ValueError(f"bucket {index} waits for an earlier one, or was not handed over in this round")
        return done.result(timeout_s)

    def wait(self) -> bool:
        """Waits for all reductions of the round. False: the epoch is gone."""
        outcomes = [entry.done.result() for entry in self._entries if entry.done is not None]
        return len(outcomes) == len(self._entries) and all(outcomes)

    def commit(self) -> None:
        """Replaces the local gradients by the sums. Only after the world has agreed."""
        self._graveyard.clear()
        for index, entry in enumerate(self._entries):
            assert entry.result is not None
            entry.bucket.fill(entry.result)
            self._buffers[index] = entry.result
