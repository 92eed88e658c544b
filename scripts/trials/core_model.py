"""The model of the core trainer, and what a run without failures gives: computed here, in one process.

A linear model on random samples, in double precision: sums in another order differ by 1e-15, so what is more than
that is not the order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

LEARNING_RATE, MOMENTUM = 0.2, 0.9

Vector = NDArray[np.float64]


@dataclass
class Curve:
    """Losses of all microbatches, by iteration."""

    losses: dict[int, list[float]] = field(default_factory=dict)
    evaluations: dict[int, list[float]] = field(default_factory=dict)


def initial_weights(width: int) -> Vector:
    return np.random.default_rng(1).standard_normal(width)


def sample(width: int, step: int, microbatch: int) -> tuple[Vector, float]:
    """Input and target of a microbatch; those of an evaluation have a negative step."""
    rng = np.random.default_rng((abs(step), int(step < 0), microbatch))
    return rng.standard_normal(width), float(rng.standard_normal())


def failure_free(width: int, iterations: int, microbatches: int, eval_every: int) -> Curve:
    """What every run has to come to."""
    weights, curve = initial_weights(width), Curve()
    velocity, root = np.zeros(width), float(np.sqrt(width))
    for step in range(1, iterations + 1):
        gradient, losses = np.zeros(width), []
        for microbatch in range(microbatches):
            inputs, target = sample(width, step, microbatch)
            error = float(inputs @ weights) / root - target
            losses.append(0.5 * error**2)
            gradient += inputs * (error / (root * microbatches))
        velocity = MOMENTUM * velocity + gradient
        weights -= LEARNING_RATE * velocity
        curve.losses[step] = losses
        if step % eval_every == 0:
            pairs = [sample(width, -step, microbatch) for microbatch in range(microbatches)]
            curve.evaluations[step] = [0.5 * (float(x @ weights) / root - y) ** 2 for x, y in pairs]
    return curve
