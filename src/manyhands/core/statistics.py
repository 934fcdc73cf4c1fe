"""Several measurements of one thing as a median with an interval that claims no more than they show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

NOISY = 0.15  # a machine this much slower than at its best says little about a few per cent between runs
CONFIDENCE = 0.95


class Summary(NamedTuple):
    """A median and its interval; both ends are the median where there is one measurement."""

    median: float
    low: float
    high: float
    n: int


class Estimate(NamedTuple):
    """A fitted number and its 95 % interval."""

    value: float
    low: float
    high: float


def summary(values: Sequence[float]) -> Summary:
    """The median and its 95 % interval from order statistics, whatever the distribution.

    Up to five values no two of them enclose the median so surely: there the interval is the whole range,
    whose coverage is smaller (see `coverage`), and n says so.
    """
    if not values:
        raise ValueError("a summary needs at least one value")
    ordered = sorted(values)
    n = len(ordered)
    skip = _skipped(n)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    median = min(max(middle, ordered[0]), ordered[-1])  # rounding must not push it out of its own range
    return Summary(median, min(median, ordered[skip]), max(median, ordered[n - 1 - skip]), n)


def coverage(n: int) -> float:
    """How surely the interval of n values holds the true median: 0.5 for two, 0.94 for five."""
    return _between(n, _skipped(n)) if n > 1 else 0.0


def ratio(over: Summary, under: Summary) -> Summary:
    """One over the other; their relative half-widths are combined as those of independent measurements."""
    value = over.median / under.median
    down = math.hypot(_steps(over.low, over.median), _steps(under.median, under.high))
    up = math.hypot(_steps(over.median, over.high), _steps(under.low, under.median))
    return Summary(value, value * math.exp(-down), value * math.exp(up), min(over.n, under.n))


def apart(one: Summary, other: Summary) -> bool:
    """Whether their intervals do not touch."""
    return one.high < other.low or other.high < one.low


def _steps(low: float, high: float) -> float:
    """The distance in logarithms, in which a ratio's interval is symmetric and stays above zero."""
    return math.log(high / low) if low > 0 else 0.0 if high == low else math.inf


def _skipped(n: int) -> int:
    """How many values at each end may be left out so that those between still hold the median."""
    skip = 0
    while _between(n, skip + 1) >= CONFIDENCE:
        skip += 1
    return skip


def _between(n: int, skip: int) -> float:
    """The chance that the median lies between the values after `skip` at either end: a binomial's middle."""
    outside = sum(math.comb(n, k) for k in range(min(skip, n) + 1))
    return max(0.0, 1 - 2 * outside / float(2**n))


def at_its_best(calibrations: Sequence[float]) -> float:
    """What a fixed piece of work takes when the machine is at its best: a quarter of the times is shorter.

    The least of many would be a lucky moment that no run can have.
    """
    return sorted(calibrations)[len(calibrations) // 4]
