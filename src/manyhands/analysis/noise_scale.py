"""The gradient noise scale of McCandlish et al., and how well it predicts the critical batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from manyhands.analysis import groups
from manyhands.analysis.regimes import regimes
from manyhands.core.statistics import Estimate
from manyhands.records.record import Noise, RunRecord

DRAWS = 500  # bootstrap samples
SEED = 20181214


ALIKE = 1.05  # sample counts up to this factor apart are combined into one point


class NoisePoint(NamedTuple):
    """The noise scale after some number of samples."""

    samples: int
    scale: float


class NoiseScale(NamedTuple):
    """B_simple of a task, next to the B_crit that was fitted to steps to the target."""

    task: str
    scale: Estimate | None
    runs: int
    by_samples: list[NoisePoint]
    critical: Estimate | None
    ratio: float | None  # B_simple / B_crit


def noise_scales(records: Iterable[RunRecord]) -> list[NoiseScale]:
    """Return one row per task with at least one run that measured its gradient noise."""
    everything = list(records)
    found = []
    for task in groups.tasks(everything):
        # the gradients of a run that diverges are not representative
        mine = [each for each in groups.of_task(everything, task) if each.status != "diverged"]
        noises = [record.noise for record in mine if record.noise is not None and record.noise.steps > 0]
        if noises:
            scale = _scale(sorted(noises, key=repr))  # so that the order of the runs does not matter
            critical = next((fit.b_crit for fit in regimes(mine) if fit.b_crit is not None), None)
            ratio = scale.value / critical.value if scale and critical else None
            found.append(NoiseScale(task, scale, len(noises), _by_samples(mine), critical, ratio))
    return found


def _scale(noises: Sequence[Noise]) -> Estimate | None:
    """Return the ratio of means, not the mean of ratios: each estimate is unbiased, but their ratio is not.

    The interval is a bootstrap over runs; with one run it is a point.
    """
    weights = np.array([noise.steps for noise in noises], dtype=float)
    gradients = np.array([noise.gradient for noise in noises]) * weights
    spreads = np.array([noise.spread for noise in noises]) * weights
    if gradients.sum() <= 0 or spreads.sum() <= 0:
        return None
    value = float(spreads.sum() / gradients.sum())
    chosen = np.random.default_rng(SEED).integers(len(noises), size=(DRAWS, len(noises)))
    below, above = gradients[chosen].sum(axis=1), spreads[chosen].sum(axis=1)
    drawn = above[(below > 0) & (above > 0)] / below[(below > 0) & (above > 0)]
    low, high = np.quantile(drawn, [0.025, 0.975]) if len(drawn) else (value, value)
    return Estimate(value, min(value, float(low)), max(value, float(high)))


def _by_samples(records: Sequence[RunRecord]) -> list[NoisePoint]:
    """Return the noise scale over training: at each point, the mean over runs after about as many samples."""
    points = [(point.samples, point.noise) for record in records for point in record.curve if point.noise]
    sums: dict[int, tuple[float, float]] = {}
    last = 0
    for samples, noise in sorted(points):
        # runs with different batches evaluate after slightly different numbers of samples
        last = last if last and samples <= ALIKE * last else samples
        gradient, spread = sums.get(last, (0.0, 0.0))
        sums[last] = gradient + noise[0], spread + noise[1]
    return [
        NoisePoint(samples, spread / gradient)
        for samples, (gradient, spread) in sorted(sums.items())
        if gradient > 0 and spread > 0
    ]
