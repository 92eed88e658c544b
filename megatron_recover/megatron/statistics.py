"""Seam: statistics over all microbatches that steer training or are logged.

Router token counts (they move the expert bias) are summed over replicas like a gradient. MoE loss trackers are
only logged; they travel as named sums.
"""

from __future__ import annotations

from typing import Any

from megatron_recover.recovery import Bucket
from megatron_recover.session import Iteration


def buckets(model: list[Any]) -> list[Bucket]:
    """Token counts per expert of every router with an expert bias, as tensors to be summed."""
    found = []
    for number, chunk in enumerate(model):
        for name, module in chunk.named_modules():
            counts = getattr(module, "local_tokens_per_expert", None)
            if counts is not None and getattr(module, "expert_bias", None) is not None:
                found.append(Bucket(f"chunk {number} {name} tokens per expert", counts))
    return found


class Trackers:
    """MoE loss trackers of one iteration: each rank adds what it saw, and logs the sum over replicas."""

    def __init__(self, iteration: Iteration) -> None:
        self._iteration = iteration
        self._base = _values()
        self._seen = self._base

    def round_done(self) -> None:
        """Adds what the round that has just run brought."""
        now = _values()
        for key, value in now.items():
            self._iteration.add("moe/" + key, value - self._seen.get(key, 0.0))
        self._seen = now

    def committed(self) -> None:
        """Lets the trackers hold the sums over all replicas, for Megatron to log."""
        for name, entry in _entries().items():
            for layer in range(entry.values.numel()):
                key = f"{name}/{layer}"
                entry.values[layer] = self._base.get(key, 0.0) + self._iteration.sums.get("moe/" + key, 0.0)


def _values() -> dict[str, float]:
    return {
        f"{name}/{layer}": value
        for name, entry in _entries().items()
        for layer, value in enumerate(entry.values.tolist())
    }


def _entries() -> dict[str, Any]:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    return dict(get_moe_metrics_tracker().metrics)
