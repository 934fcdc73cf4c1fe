"""S = S_min (1 + B_crit/B) through steps to a target by batch size, with what was not reached as a bound."""

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

FEWEST = 3  # batches: two parameters go through any two points and leave nothing to judge the fit by
DRAWS = 200  # enough for the ends of a 95 % interval to be steady to a few per cent
SEED = 20181108  # fixed, so that one study gives one report
SPREAD = 0.05  # of a number of steps, at least: where there is one seed, others would differ by as much
REACH = 1000.0  # B_crit is sought up to so many times beyond the batches that were run

Numbers = NDArray[np.float64]


class Observation(NamedTuple):
    """Steps at a batch and their relative spread; or, censored, the steps within which it was not reached."""

    batch: float
    steps: float
    spread: float = 0.0
    censored: bool = False


class Fit(NamedTuple):
    """The two numbers of the curve."""

    s_min: float
    b_crit: float

    def steps(self, batch: float) -> float:
        """S(B)."""
        return self.s_min * (1 + self.b_crit / batch)


class Interval(NamedTuple):
    """The same with their uncertainty."""

    s_min: Estimate
    b_crit: Estimate


class _Points(NamedTuple):
    """Observations as columns."""

    batch: Numbers
    logs: Numbers
    spread: Numbers
    censored: NDArray[np.bool_]


def fit(observations: Sequence[Observation]) -> Fit:
    """The best curve: least squares of log steps; a bound counts where the curve comes below it."""
    return _solve(_columns(observations))


@lru_cache(maxsize=256)  # several analyses ask for the same curve
def estimate(observations: tuple[Observation, ...]) -> Interval:
    """The best curve and its 95 % intervals, from a bootstrap of the steps with a fixed seed.

    Each step count is drawn anew around the curve, as far as seeds lay apart or as the curve missed the
    points, whichever is more.
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
    """Fitted as S = E_min/B + S_min: each end of the data speaks for one of the two."""
    lower, upper, starts = _room(points)
    if near is not None:  # a resampled curve is not far from the one it came from
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
    """Where log E_min and log S_min are sought, and from where: beyond it the curve is a straight line."""
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
    share = expit(x[0] - x[1] - np.log(points.batch))  # of E_min/B in S
    idle = points.censored & (_residuals(x, points) <= 0)
    weight = np.where(idle, 0.0, -1.0 / points.spread)
    return np.stack([share * weight, (1 - share) * weight], axis=1)


def _misfit(points: _Points, curve: Fit) -> float:
    """How far the points lie from the curve, with the freedom that it took to get there counted."""
    missed = (points.logs - _model(points.batch, curve))[~points.censored]
    return float(np.sqrt((missed**2).sum() / max(1, len(missed) - 2)))


def _interval(value: float, drawn: Sequence[float]) -> Estimate:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(value, min(value, float(low)), max(value, float(high)))
