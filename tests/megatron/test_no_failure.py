"""When nothing fails, R replicas are vanilla Megatron with data-parallel size R."""

from __future__ import annotations

import pytest
from training_runs import recover, vanilla

ITERATIONS = 20


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (4, ""),
        (4, "--tensor-model-parallel-size 2"),
        (4, "--pipeline-model-parallel-size 2"),
    ],
    ids=["dp4", "tp2", "pp2"],
)
def test_losses_and_gradient_norms_equal_vanilla(num_ranks: int, flags: str) -> None:
    theirs = vanilla(num_ranks, flags, iterations=ITERATIONS)
    ours = recover(num_ranks, flags, iterations=ITERATIONS)
    assert sorted(ours.losses) == sorted(theirs.losses) == list(range(1, ITERATIONS + 1))
    for number in ours.losses:
        assert ours.losses[number] == pytest.approx(theirs.losses[number], rel=1e-6)
        # Megatron prints norms with three decimals.
        assert ours.grad_norms[number] == pytest.approx(theirs.grad_norms[number], abs=1.01e-3)
    assert [event["event"] for event in ours.events] == ["start", "finish"]
