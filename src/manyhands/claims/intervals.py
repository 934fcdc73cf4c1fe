"""Intervals of a few seeds: means, slopes, and the value up to which nothing is lost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from manyhands.core.statistics import Estimate, student_t

UNKNOWN = Estimate(math.nan, -math.inf, math.inf)


def mean(values: Sequence[float]) -> Estimate:
    """The mean with its 95 % interval (Student's t); one value says nothing about its own spread."""
    n = len(values)
    if n == 0:
        return UNKNOWN
    center = math.fsum(values) / n
    if n == 1:
        return Estimate(center, -math.inf, math.inf)
    variance = math.fsum((value - center) ** 2 for value in values) / (n - 1)
    reach = student_t(n - 1) * math.sqrt(variance / n)
    return Estimate(center, center - reach, center + reach)


def ratio(over: Mapping[int, float], under: Mapping[int, float]) -> Estimate:
    """The mean ratio of two sides that share their seeds or rounds, on logarithms."""
    shared = sorted(over.keys() & under.keys())
    return exponent(mean([math.log(over[key] / under[key]) for key in shared]))


def difference(one: Mapping[int, float], other: Mapping[int, float]) -> Estimate:
    """The mean of one minus the other where they share their seeds."""
    return mean([one[key] - other[key] for key in sorted(one.keys() & other.keys())])


def exponent(logs: Estimate) -> Estimate:
    """The estimate of exp(x) from that of x."""
    return Estimate(*(math.exp(value) if value < 700 else math.inf for value in logs))


def slope(points: Sequence[tuple[float, float]]) -> Estimate:
    """The slope of y over x by least squares, with its 95 % interval."""
    n = len(points)
    if n < 2:
        return UNKNOWN
    x_mean, y_mean = (math.fsum(point[axis] for point in points) / n for axis in (0, 1))
    squares = math.fsum((x - x_mean) ** 2 for x, _ in points)
    if squares == 0:
        return UNKNOWN
    value = math.fsum((x - x_mean) * (y - y_mean) for x, y in points) / squares
    if n == 2:
        return Estimate(value, -math.inf, math.inf)
    missed = math.fsum((y - y_mean - value * (x - x_mean)) ** 2 for x, y in points)
    reach = student_t(n - 2) * math.sqrt(missed / (n - 2) / squares)
    return Estimate(value, value - reach, value + reach)


class Level(NamedTuple):
    """What is lost at some value of x."""

    x: float
    lost: Estimate


def knee(levels: Sequence[Level], allowed: float, start: float) -> Estimate:
    """The largest x at which no more is lost than allowed; the levels are in ascending order of x.

    Its lower end is the last x that surely loses no more, with all before it; its upper end the first that
    surely loses more. `start` is the reference, which loses nothing.

        lost         I           x: the estimate, where a line through the levels crosses what is allowed
        allowed  ----|---x---
              I    I
              low    high
    """
    low, high = start, math.inf
    for level in levels:
        if level.lost.high > allowed:
            break
        low = level.x
    for level in levels:
        if level.lost.low > allowed:
            high = level.x
            break
    value = max(start, levels[-1].x) if levels else start
    before = Level(start, Estimate(min(0.0, allowed), 0.0, 0.0))
    for level in levels:
        if level.lost.value > allowed:
            value = _crossing(before, level, allowed)
            break
        before = level
    return Estimate(min(max(value, low), high), low, high)


def _crossing(before: Level, after: Level, allowed: float) -> float:
    """Where a straight line over log x reaches what is allowed."""
    rise = after.lost.value - before.lost.value
    share = (allowed - before.lost.value) / rise if math.isfinite(rise) and rise > 0 else 0.0
    return before.x * math.pow(after.x / before.x, min(1.0, max(0.0, share)))
