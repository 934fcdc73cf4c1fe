"""Steps to the target at one batch with the best learning rate tried, and how sure it is that it is the best.

The best of a few rates is not the best of all. How much another rate could have saved is estimated from the
rates beside it, and counts as uncertainty of the steps:

    log steps  *                       the parabola through three rates has its
                \\           *         lowest point between them, a little below
                 \\__    __/           the best one that was tried
                    *'''
                --------------- log rate
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.crossing import crossing
from manyhands.analysis.fit import Observation
from manyhands.analysis.target import censored
from manyhands.records.record import RunRecord

STEEPEST = 1.0  # log steps: a rate that is worse than this, or diverges, says only that it is too far away
MEDIAN = 1.2  # times the standard error of a mean: that of the median of three values or more


class BatchPoint(NamedTuple):
    """Steps to the target at one batch, with the best learning rate that was tried."""

    batch: int
    steps: float | None
    low: float | None
    high: float | None
    reached: int
    of: int
    bound: int | None  # the target was not reached within this number of steps
    spread: float = 0.0  # of log steps: from the distance between evaluations
    recipe_line: str = ""
    lr: float | None = None
    rates: int = 1  # learning rates that were tried
    edge: bool = False  # whether the best of them is the smallest or the largest
    tuning: float = 0.0  # of log steps: what a rate between those that were tried could save
    between: float = 0.0  # of log steps: the standard error as the seeds show it
    runs: tuple[str, ...] = ()


def observations(points: Sequence[BatchPoint]) -> tuple[Observation, ...]:
    """What the fit takes: points, and bounds where the target was not reached.

    What tuning leaves open is averaged over the batches, because at each of them it is known from three noisy
    runs only.
    """
    tuned = [point.tuning for point in points if point.steps is not None and point.rates > 1]
    tuning = math.sqrt(math.fsum(each**2 for each in tuned) / len(tuned)) if tuned else 0.0
    found = []
    for point in points:
        spread = math.hypot(point.spread, tuning)
        if point.steps is not None:
            freedom = point.reached - 1 if point.between else 0
            found.append(
                Observation(point.batch, point.steps, spread, between=point.between, freedom=freedom)
            )
        elif point.bound:
            found.append(Observation(point.batch, point.bound, spread, censored=True))
    return tuple(found)


def recipe_family(record: RunRecord) -> str:
    """A text that is equal for runs whose recipes differ at most in the learning rate."""
    rest = {name: value for name, value in record.recipe.items() if name != "lr"}
    return json.dumps(rest, sort_keys=True, default=str)


def batch_point(batch: int, group: Sequence[RunRecord]) -> BatchPoint:
    """The point of the best learning rate; Shallue et al. tune for each batch, too."""
    by_rate: dict[float | None, list[RunRecord]] = {}
    for record in group:
        by_rate.setdefault(_lr(record), []).append(record)
    tried = [_tried(batch, by_rate[rate]) for rate in sorted(by_rate, key=lambda rate: rate or 0.0)]
    arrived = [point for point in tried if point.steps is not None]
    if arrived:
        best = min(arrived, key=lambda point: (point.steps or math.inf, point.recipe_line))
    else:
        # the steps of the best learning rate are only known to exceed the smallest bound
        bounds = [point.bound for point in tried if point.bound is not None]
        best = min(tried, key=lambda point: (-point.reached / point.of, point.recipe_line))
        best = best._replace(bound=min(bounds, default=None))
    if not arrived or len(tried) == 1:
        return best._replace(rates=len(tried))
    tuning = _tuning(tried, tried.index(best))
    return best._replace(rates=len(tried), edge=best in (tried[0], tried[-1]), tuning=tuning)


def _lr(record: RunRecord) -> float | None:
    lr = record.recipe.get("lr")
    return float(lr) if isinstance(lr, int | float) else None


def _tried(batch: int, group: Sequence[RunRecord]) -> BatchPoint:
    arrived = [record for record in group if groups.succeeded(record)]
    late = [record for record in group if not groups.succeeded(record)]
    crossings = [each for record in arrived if (each := crossing(record)) is not None]
    found = censored([each.steps for each in crossings], [record.steps for record in late])
    # a run that diverged would never have reached the target: it gives no bound
    bounds = [record.steps for record in late if record.status != "diverged"]
    point = BatchPoint(
        batch=batch,
        steps=found.median if found else None,
        low=found.low if found else None,
        high=found.high if found else None,
        reached=len(arrived),
        of=len(group),
        bound=None if found else min(bounds, default=None),
        recipe_line=group[0].recipe_line,
        lr=_lr(group[0]),
        runs=groups.runs(group),
    )
    if found is None:
        return point
    apart = max((each.spread for each in crossings), default=0.0) / math.sqrt(len(crossings))
    return point._replace(spread=apart, between=_between([each.steps for each in crossings]))


def _between(steps: Sequence[float]) -> float:
    """The standard error of the median of log steps over seeds; 0 with one seed."""
    n = len(steps)
    if n < 2:
        return 0.0
    logs = [math.log(each) for each in steps]
    center = math.fsum(logs) / n
    deviation = math.sqrt(math.fsum((each - center) ** 2 for each in logs) / (n - 1))
    return (MEDIAN if n > 2 else 1.0) * deviation / math.sqrt(n)


def _tuning(tried: Sequence[BatchPoint], best: int) -> float:
    """How much less log steps another rate could need: below the parabola, or as the last step saved."""
    below, above = (
        _worse(tried[best], tried[index]) if 0 <= index < len(tried) else None
        for index in (best - 1, best + 1)
    )
    if below is None or above is None:
        beside = above if below is None else below
        return 0.0 if beside is None else beside / 2
    return (below - above) ** 2 / (8 * (below + above)) if below + above > 0 else 0.0


def _worse(best: BatchPoint, other: BatchPoint) -> float:
    if best.steps is None or other.steps is None:
        return STEEPEST
    return min(STEEPEST, max(0.0, math.log(other.steps / best.steps)))
