"""A made-up run that measures its gradient noise, whose true noise scale is known."""

from __future__ import annotations

import math

import numpy as np

from manyhands.records.record import Evaluation, Noise, RunRecord
from manyhands.testing.records import record

EVERY = 3000  # samples between two evaluations
LEAST = 30, 120  # evaluations and steps of a run: a large batch needs more samples
DIMENSIONS = 4  # in how many directions gradients are noisy: few of them, as in real networks


def _truth(progress: float) -> tuple[float, float]:
    """|G|^2, which falls 23-fold from the start at 0 to the end at 1, and tr(S), which falls to 40 %."""
    return 2.3 / (1 + 10 * progress) ** 1.3, 170 / (1 + 3.75 * progress) ** 0.6


TRUE_SCALE = math.fsum(s / g for g, s in (_truth((n + 0.5) / 1000) for n in range(1000))) / 1000


def simulated_noise(
    batch: int, chance: np.random.Generator, *, between: float = 0.0, seed: int = 0
) -> RunRecord:
    """A run at this batch; the noise of seeds differs by `between`.

    The gradients of two halves of a batch are drawn, and their norms compared as in engine/noise_meter.py.
    """
    steps, louder = max(1, EVERY // batch), math.exp(between * chance.standard_normal())
    evaluations, curve = max(LEAST[0], LEAST[1] // steps), []
    for n in range(1, evaluations + 1):
        gradient, spread = _truth((n - 0.5) / evaluations)
        mean = np.zeros(DIMENSIONS)
        mean[0] = math.sqrt(gradient)
        deviation = math.sqrt(louder * spread / DIMENSIONS / (batch / 2))
        first, second = mean + deviation * chance.standard_normal((2, steps, DIMENSIONS))
        small, big = (first**2).sum(axis=1), (((first + second) / 2) ** 2).sum(axis=1)
        traces = batch * (small - big)
        pair = float((big - traces / batch).mean()), float(traces.mean())
        curve.append(
            Evaluation(step=n * steps, samples=n * steps * batch, seconds=float(n), metric=0.5, noise=pair)
        )
    whole = Noise(small=batch / 2, big=batch, gradient=1.0, spread=1.0, steps=evaluations * steps)
    name = f"seed-{seed}"
    return record(
        batch=batch, accumulate=2, steps_to_target=None, seed=seed, curve=curve, noise=whole, run=name
    )
