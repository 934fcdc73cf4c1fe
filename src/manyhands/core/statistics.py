"""Medians of repeated measurements with confidence intervals."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

NOISY = 0.15  # if a machine is this much slower than at its best, small differences mean nothing
CONFIDENCE = 0.95
# The relative standard deviation of one measured speed on a machine that is shared, as far as is known before
# anything is measured, and how many degrees of freedom that assumption is worth beside measured ones.
USUAL_NOISE = 0.08
USUAL_FREEDOM = 4
UNUSUAL = 4.0  # times the usual variance
USUAL_SEEDS = 0.06  # the same of the samples that runs with different seeds need to reach a target


class Summary(NamedTuple):
    """A median and its interval. With one measurement both ends are the median."""

    median: float
    low: float
    high: float
    n: int


class Estimate(NamedTuple):
    """A fitted value and its 95 % interval."""

    value: float
    low: float
    high: float


def summary(values: Sequence[float]) -> Summary:
    """The median and its 95 % interval from order statistics, whatever the distribution.

    With five values or fewer, the interval is their whole range, and its coverage is smaller than 95 % (see
    `coverage`).
    """
    if not values:
        raise ValueError("a summary needs at least one value")
    ordered = sorted(values)
    n = len(ordered)
    skip = _skipped(n)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    median = min(max(middle, ordered[0]), ordered[-1])  # rounding must not move it out of the range
    return Summary(median, min(median, ordered[skip]), max(median, ordered[n - 1 - skip]), n)


def measured(values: Sequence[float], noise: float = 0.0, usual: float = USUAL_NOISE) -> Summary:
    """The median of speeds or times, with a 95 % interval that is never a point.

    A few measurements say little about their own spread, so it is combined with what is usual: the moderated
    t interval of Smyth (2004), on logarithms. `noise` is a further relative standard deviation of each value
    that repeating does not show, such as the distance between two evaluations.
    """
    middle = summary(values).median
    logs = [math.log(value) for value in values]
    n, center = len(logs), math.fsum(logs) / len(logs)
    own = moderated(logs, usual**2, USUAL_FREEDOM)
    reach = math.hypot(own, student_t(USUAL_FREEDOM + n - 1) * noise / math.sqrt(n))
    low, high = math.exp(center - reach), math.exp(center + reach)
    return Summary(middle, min(middle, low), max(middle, high), n)


def moderated(values: Sequence[float], usual: float, freedom: int, level: float = 1 - CONFIDENCE) -> float:
    """How far the mean of values may be from the truth, at this level: half of a t interval.

    A few values say little about their own spread, so it is combined with the variance that is `usual`, which
    counts as much as `freedom` further values (Smyth 2004). One value is enough. Values that vary much more
    than usual show that this machine, or this day, is not the usual one: then that counts for less.
    """
    n, center = len(values), math.fsum(values) / len(values)
    squares = math.fsum((each - center) ** 2 for each in values)
    if n > 1 and squares > UNUSUAL * usual * (n - 1):
        freedom = math.floor(freedom * UNUSUAL * usual * (n - 1) / squares)
    known = freedom + n - 1
    return student_t(known, level) * math.sqrt((freedom * usual + squares) / known / n)


def around(center: float, reach: float, n: int) -> Summary:
    """The summary of what was measured as a logarithm."""
    return Summary(math.exp(center), math.exp(center - reach), math.exp(center + reach), n)


@functools.cache
def student_t(freedom: int, level: float = 1 - CONFIDENCE) -> float:
    """The distance from 0 that Student's t exceeds with this probability, on both sides together.

    Exact for whole degrees of freedom, and without scipy, for the sake of the command line: the distribution
    is a finite sum in the angle atan(t / sqrt(freedom)) (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _inside(angle, freedom) < 1 - level else (low, angle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _inside(angle: float, freedom: int) -> float:
    """The probability of |t| <= sqrt(freedom) * tan(angle)."""
    sine, cosine, odd = math.sin(angle), math.cos(angle), freedom % 2
    term, total = cosine if odd else 1.0, 0.0
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * power / (power + 1)
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


def coverage(n: int) -> float:
    """The probability that the interval of n values contains the median: 0.5 for two, 0.94 for five."""
    return _between(n, _skipped(n)) if n > 1 else 0.0


def ratio(over: Summary, under: Summary) -> Summary:
    """One divided by the other. The relative widths are combined as for independent measurements."""
    value = over.median / under.median
    down = math.hypot(_steps(over.low, over.median), _steps(under.median, under.high))
    up = math.hypot(_steps(over.median, over.high), _steps(under.low, under.median))
    return Summary(value, value * math.exp(-down), value * math.exp(up), min(over.n, under.n))


def apart(one: Summary, other: Summary) -> bool:
    """Whether their intervals do not overlap."""
    return one.high < other.low or other.high < one.low


def _steps(low: float, high: float) -> float:
    """The distance in logarithms: there the interval of a ratio is symmetric and stays positive."""
    return math.log(high / low) if low > 0 else 0.0 if high == low else math.inf


def _skipped(n: int) -> int:
    """How many values may be dropped at each end so that the rest still contains the median."""
    skip = 0
    while _between(n, skip + 1) >= CONFIDENCE:
        skip += 1
    return skip


def _between(n: int, skip: int) -> float:
    """The probability that the median lies within the values that are left after `skip` at each end."""
    outside = sum(math.comb(n, k) for k in range(min(skip, n) + 1))
    return max(0.0, 1 - 2 * outside / float(2**n))


def at_its_best(calibrations: Sequence[float]) -> float:
    """The time of a fixed amount of work when the machine is at its best: the lower quartile.

    The minimum of many would be a lucky moment that no run can have.
    """
    return sorted(calibrations)[len(calibrations) // 4]
