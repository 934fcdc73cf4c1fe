"""Fit S = S_min (1 + B_crit/B) to steps to a target by batch size; runs that did not reach it are bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.special import expit

from manyhands.core.statistics import Estimate

FEWEST = 3  # batches: two parameters fit any two points exactly, and nothing is left to judge the fit by
DRAWS = 200  # bootstrap samples: enough for the ends of a 95 % interval to vary by a few percent only
SEED = 20181108  # fixed, so that one study gives one report
SPREAD = 0.05  # least relative spread of steps: with only one seed, others would differ this much
REACH = 1000.0  # B_crit is searched up to this factor beyond the batches that were run

Numbers = NDArray[np.float64]


class Observation(NamedTuple):
    """Steps to the target at a batch, and their relative spread; if censored, steps that were not enough."""

    batch: float
    steps: float
    spread: float = 0.0
    censored: bool = False


class Fit(NamedTuple):
    """The two parameters of the curve."""

    s_min: float
    b_crit: float

    def steps(self, batch: float) -> float:
        """S(B), the steps to the target at a batch."""
        return self.s_min * (1 + self.b_crit / batch)


class Interval(NamedTuple):
    """The two parameters of the curve, with their 95 % intervals."""

    s_min: Estimate
    b_crit: Estimate


class _Points(NamedTuple):
    """Observations as arrays, one per field."""

    batch: Numbers
    logs: Numbers
    spread: Numbers
    censored: NDArray[np.bool_]


def fit(observations: Sequence[Observation]) -> Fit:
    """Fit by least squares of log steps; a bound counts only where the curve is below it."""
    return _solve(_columns(observations))


@lru_cache(maxsize=256)  # several analyses need the same curve
def estimate(observations: tuple[Observation, ...]) -> Interval:
    """Return the best fit and its 95 % intervals, from a parametric bootstrap with a fixed seed.

    Each number of steps is drawn around the curve with the spread between seeds or the residual of the fit,
    whichever is larger.
    """
    points = _columns(observations)
    best = _solve(points)
    noise = np.maximum(points.spread, _misfit(points, best))
    random = np.random.default_rng(SEED)
    center = np.where(points.censored, points.logs, _model(points.batch, best))
    drawn = []
    for _ in range(DRAWS):
        logs = np.where(points.censored, points.logs, center + noise * random.standard_normal(len(noise)))
        drawn.append(_solve(points._replace(logs=logs), near=best))
    return Interval(
        _interval(best.s_min, [each.s_min for each in drawn]),
        _interval(best.b_crit, [each.b_crit for each in drawn]),
    )


def _columns(observations: Sequence[Observation]) -> _Points:
    return _Points(
        np.array([each.batch for each in observations], dtype=float),
        np.log([each.steps for each in observations]),
        np.array([max(SPREAD, each.spread) for each in observations]),
        np.array([each.censored for each in observations], dtype=bool),
    )


def _model(batch: Numbers, curve: Fit) -> Numbers:
    logs: Numbers = np.log1p(curve.b_crit / batch) + math.log(curve.s_min)
    return logs


def _solve(points: _Points, near: Fit | None = None) -> Fit:
    """Fit S = E_min/B + S_min: small batches determine E_min, large ones S_min."""
    lower, upper, starts = _room(points)
    if near is not None:  # the fit of a bootstrap sample is close to the original one
        starts = [np.log([near.s_min * near.b_crit, near.s_min])]
    precision = 1e-12 if near is None else 1e-6
    found = [
        least_squares(
            _residuals,
            np.clip(start, lower, upper),
            jac=_slopes,
            bounds=(lower, upper),
            xtol=precision,
            ftol=precision,
            args=(points,),
        )
        for start in starts
    ]
    samples, steps = min(found, key=lambda each: float(each.cost)).x
    return Fit(math.exp(steps), math.exp(samples - steps))


def _room(points: _Points) -> tuple[Numbers, Numbers, list[Numbers]]:
    """Bounds and starts of the search for log E_min and log S_min; beyond, the curve is a straight line."""
    known = ~points.censored
    sizes, logs = np.log(points.batch[known]), points.logs[known]
    corner = np.array([(sizes + logs).min(), logs.min()])
    far = math.log(2 * REACH)
    lower = corner - [far, far + sizes.max() - sizes.min()]
    return lower, corner + far, [corner, corner - [0.0, 3.0]]


def _residuals(x: Numbers, points: _Points) -> Numbers:
    missed = points.logs - np.logaddexp(x[0] - np.log(points.batch), x[1])
    counted: Numbers = np.where(points.censored, np.maximum(missed, 0.0), missed) / points.spread
    return counted


def _slopes(x: Numbers, points: _Points) -> Numbers:
    share = expit(x[0] - x[1] - np.log(points.batch))  # E_min/B as a share of S
    idle = points.censored & (_residuals(x, points) <= 0)
    weight = np.where(idle, 0.0, -1.0 / points.spread)
    return np.stack([share * weight, (1 - share) * weight], axis=1)


def _misfit(points: _Points, curve: Fit) -> float:
    """The standard deviation of the residuals, corrected for the two fitted parameters."""
    missed = (points.logs - _model(points.batch, curve))[~points.censored]
    return float(np.sqrt((missed**2).sum() / max(1, len(missed) - 2)))


def _interval(value: float, drawn: Sequence[float]) -> Estimate:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(value, min(value, float(low)), max(value, float(high)))
