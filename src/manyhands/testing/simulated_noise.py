"""A made-up run that measures its gradient noise, whose true noise scale is known."""

from __future__ import annotations

import math

import numpy as np

from manyhands.records.record import Evaluation, Noise, RunRecord
from manyhands.testing.records import record

EVALUATIONS, EVERY = 30, 3000  # samples between two evaluations
DIMENSIONS = 4  # in how many directions gradients are noisy: few of them, as in real networks

# |G|^2 falls 25-fold, tr(S) to less than half
_GRADIENTS = [2.3 / (1 + n / 3) ** 1.3 for n in range(EVALUATIONS)]
_SPREADS = [170 / (1 + n / 8) ** 0.6 for n in range(EVALUATIONS)]
TRUE_SCALE = math.fsum(s / g for s, g in zip(_SPREADS, _GRADIENTS, strict=True)) / EVALUATIONS


def simulated_noise(
    batch: int, chance: np.random.Generator, *, between: float = 0.0, seed: int = 0
) -> RunRecord:
    """A run at this batch; the noise of seeds differs by `between`.

    The gradients of two halves of a batch are drawn, and their norms compared as in engine/noise_meter.py.
    """
    steps, louder = max(1, EVERY // batch), math.exp(between * chance.standard_normal())
    curve = []
    for n, (gradient, spread) in enumerate(zip(_GRADIENTS, _SPREADS, strict=True), 1):
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
    whole = Noise(small=batch / 2, big=batch, gradient=1.0, spread=1.0, steps=EVALUATIONS * steps)
    return record(
        batch=batch,
        accumulate=2,
        steps_to_target=None,
        seed=seed,
        curve=curve,
        noise=whole,
        run=f"seed-{seed}",
    )
