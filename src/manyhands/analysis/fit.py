"""Fit S = S_min (1 + B_crit/B) to steps to a target by batch size; runs that did not reach it are bounds.

The 95 % interval of a parameter is the set of its values with which the curve, its other parameter free, fits
almost as well as the best one (the profile likelihood). "Almost" is Student's t times the noise of the
points. The noise is measured by how far they lie from the curve and, where there are several seeds, by how
far these lie from each other, so it includes what the choice among a few learning rates leaves to chance.
Where larger or smaller batches are missing, one side of the interval extends as far as the search does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtri, log_ndtr

from manyhands.core.statistics import Estimate, student_t

FEWEST = 3  # batches: two parameters fit any two points exactly, and nothing is left to judge the fit by
# Degrees of freedom: with one of them the interval is either of no use or, where points lie on a curve by
# chance, too narrow. Of those told from 3 batches with one seed, 80 % held the truth at 30 % noise.
FREEDOM = 2
SPREAD = 0.03  # least relative noise of steps: with only one seed, others would differ this much
REACH = 1000.0  # B_crit is searched up to this factor beyond the batches that were run
GRID = 400  # values of B_crit that are tried first, before the best and the ends are refined
POOLED = 0.25  # seeds count toward the noise unless the points are this unlikely to be as noisy as they
NORMAL = 1.959964  # the 97.5 % quantile

Numbers = NDArray[np.float64]


class Observation(NamedTuple):
    """Steps to the target at a batch, and their relative spread; if censored, steps that were not enough."""

    batch: float
    steps: float
    spread: float = 0.0  # the standard deviation of log steps that is known apart from seeds
    censored: bool = False
    between: float = 0.0  # the standard deviation of log steps as a few seeds show it
    freedom: int = 0  # its degrees of freedom


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
    """Observations as arrays; `spread` is the known noise of each, and `seeds` says what seeds add to it."""

    batch: Numbers
    logs: Numbers
    spread: Numbers
    censored: NDArray[np.bool_]
    seeds: tuple[float, int]  # the variance between seeds in units of the spread, its degrees of freedom


def fit(observations: Sequence[Observation]) -> Fit:
    """Fit by maximum likelihood of log steps; a bound counts by how likely the steps are to exceed it."""
    points = _columns(observations)
    return _best(points, _noise(points)[0])


@lru_cache(maxsize=256)  # several analyses need the same curve
def estimate(observations: tuple[Observation, ...]) -> Interval:
    """Return the best fit and its 95 % intervals."""
    points = _columns(observations)
    noise, reach = _noise(points)
    best = _best(points, noise)
    allowed = float(_costs(points, noise, np.log([best.b_crit]))[0][0]) + (reach / noise) ** 2
    critical = _ends_of_batch(points, noise, allowed, best)
    steps = _ends_of_steps(points, noise, allowed, critical)
    return Interval(_interval(best.s_min, *steps), _interval(best.b_crit, *critical))


def _columns(observations: Sequence[Observation]) -> _Points:
    """Weigh points by their known spread; what a few seeds show is too vague to weigh by, and is pooled."""
    spread = np.array([max(SPREAD, each.spread) for each in observations])
    squares = [
        each.freedom * (each.between / unit) ** 2 for each, unit in zip(observations, spread, strict=True)
    ]
    freedom = sum(each.freedom for each in observations)
    return _Points(
        np.array([each.batch for each in observations], dtype=float),
        np.log([each.steps for each in observations]),
        spread,
        np.array([each.censored for each in observations], dtype=bool),
        (math.fsum(squares) / freedom if freedom else 0.0, freedom),
    )


def _noise(points: _Points) -> tuple[float, float]:
    """The noise of the points, and how far the interval reaches, both in units of their known spread."""
    noise, reach = 1.0, NORMAL
    for _ in range(4 if points.censored.any() else 1):  # how much a bound counts depends on the noise
        around, freedom = _around(points, _best(points, noise))
        noise, reach = max(1.0, around), max(NORMAL, student_t(freedom) * around)
    return noise, reach


def _around(points: _Points, curve: Fit) -> tuple[float, int]:
    """The standard deviation of the points around the curve and its degrees of freedom."""
    missed = ((points.logs - _model(points.batch, curve)) / points.spread)[~points.censored]
    squares, freedom = float((missed**2).sum()), max(1, len(missed) - 2)
    between, seeds = points.seeds
    if seeds and squares / freedom <= between * float(fdtri(freedom, seeds, 1 - POOLED)):
        squares, freedom = squares + seeds * between, freedom + seeds
    return math.sqrt(squares / freedom), freedom


def _model(batch: Numbers, curve: Fit) -> Numbers:
    logs: Numbers = np.log1p(curve.b_crit / batch) + math.log(curve.s_min)
    return logs


def _searched(points: _Points) -> Numbers:
    """The logarithms of B_crit that are tried; beyond them the curve is a straight line."""
    low, high = np.log(points.batch.min() / REACH), np.log(points.batch.max() * REACH)
    return np.linspace(low, high, GRID)


def _best(points: _Points, noise: float) -> Fit:
    grid = _searched(points)
    step = grid[1] - grid[0]
    middle = grid[int(np.argmin(_costs(points, noise, grid)[0]))]
    for _ in range(8):  # each time around the best of the last, ten times finer
        fine = np.clip(middle + step * np.linspace(-1.0, 1.0, 21), grid[0], grid[-1])
        costs, steps = _costs(points, noise, fine)
        found = int(np.argmin(costs))
        middle, step = fine[found], step / 10
    return Fit(math.exp(steps[found]), math.exp(middle))


def _costs(points: _Points, noise: float, critical: Numbers) -> tuple[Numbers, Numbers]:
    """The least cost at each log B_crit, and the log S_min that has it."""
    shape = np.log1p(np.exp(critical)[:, None] / points.batch)
    weight = np.where(points.censored, 0.0, points.spread**-2.0)
    steps = ((points.logs - shape) * weight).sum(axis=1) / weight.sum()
    if points.censored.any():  # bounds lift the curve; Newton's method climbs and never overshoots
        for _ in range(12):
            slope, bend = _derivatives(points, noise, shape + steps[:, None])
            steps = steps - slope / bend
    return _cost(points, noise, shape + steps[:, None]), steps


def _cost(points: _Points, noise: float, model: Numbers) -> Numbers:
    """Minus twice the log likelihood: of the steps that were measured, and of exceeding the bounds."""
    missed = (model - points.logs) / (noise * points.spread)
    cost: Numbers = (missed[..., ~points.censored] ** 2).sum(axis=-1)
    if points.censored.any():
        cost = cost - 2 * log_ndtr(missed[..., points.censored]).sum(axis=-1)
    return cost


def _derivatives(points: _Points, noise: float, model: Numbers) -> tuple[Numbers, Numbers]:
    """The first and second derivative of half the cost over log S_min."""
    scale = noise * points.spread
    missed = (model - points.logs) / scale
    pull = np.exp(-(missed**2) / 2 - log_ndtr(missed)) / math.sqrt(2 * math.pi)  # the inverse Mills ratio
    slope = np.where(points.censored, -pull, missed) / scale
    bend = np.where(points.censored, pull * (missed + pull), 1.0) / scale**2
    return slope.sum(axis=-1), bend.sum(axis=-1)


def _ends_of_batch(points: _Points, noise: float, allowed: float, best: Fit) -> tuple[float, float]:
    """The least and the largest log B_crit that cost no more than is allowed."""
    grid, middle = _searched(points), math.log(best.b_crit)
    inside = [*grid[_costs(points, noise, grid)[0] <= allowed], middle]
    step = grid[1] - grid[0]

    def end(last: float, beyond: float) -> float:
        for _ in range(40):
            half = (last + beyond) / 2
            if float(_costs(points, noise, np.array([half]))[0][0]) <= allowed:
                last = half
            else:
                beyond = half
        return last

    low, high = float(min(inside)), float(max(inside))
    return end(low, max(grid[0], low - step)), end(high, min(grid[-1], high + step))


def _ends_of_steps(
    points: _Points, noise: float, allowed: float, critical: tuple[float, float]
) -> tuple[float, float]:
    """The least and the largest log S_min that cost no more than is allowed, at any B_crit that does so."""
    tried = np.linspace(*critical, GRID)
    costs, middle = _costs(points, noise, tried)
    shape = np.log1p(np.exp(tried)[:, None] / points.batch)
    weight = (points.spread[~points.censored] ** -2.0).sum()
    farthest = noise * np.sqrt(np.maximum(allowed - costs, 0.0) / weight)  # as far as without bounds

    def end(sign: float) -> Numbers:
        last, beyond = np.zeros(GRID), sign * farthest
        if not points.censored.any():
            return np.asarray(middle + beyond)
        for _ in range(40):
            half = (last + beyond) / 2
            fits = _cost(points, noise, shape + (middle + half)[:, None]) <= allowed
            last, beyond = np.where(fits, half, last), np.where(fits, beyond, half)
        return np.asarray(middle + last)

    return float(end(-1.0).min()), float(end(1.0).max())


def _interval(value: float, low: float, high: float) -> Estimate:
    return Estimate(value, min(value, math.exp(low)), max(value, math.exp(high)))
