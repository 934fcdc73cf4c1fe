"""Scaling regimes: up to which batch doubling it halves the steps, and from which batch it gains nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.crossing import crossing
from manyhands.analysis.fit import FEWEST, Observation, estimate
from manyhands.analysis.target import censored
from manyhands.core import formatting
from manyhands.core.statistics import Estimate, Summary
from manyhands.records.record import RunRecord

# Scaling is perfect while a batch needs at most 20 % more samples than the smallest possible number, and
# parallelism is maximal where it needs at most 20 % more steps than the smallest possible number:
# S(B) B = S_min (B + B_crit), S(B) = S_min (1 + B_crit/B).
PERFECT = 0.2  # times B_crit
MAXIMAL = 5.0  # times B_crit
OPEN = 20.0  # times the value: the upper end of a wider interval is not determined by the measurements


class BatchPoint(NamedTuple):
    """Steps to the target at one batch, with the best learning rate that was tried."""

    batch: int
    steps: float | None
    low: float | None
    high: float | None
    reached: int
    of: int
    bound: int | None  # the target was not reached within this number of steps
    spread: float = 0.0  # relative: from seeds and the distance between evaluations
    recipe_line: str = ""


class Regimes(NamedTuple):
    """Steps to the target by batch, and the curve fitted to them."""

    task: str
    label: str
    target: float
    metric_name: str
    points: list[BatchPoint]
    s_min: Estimate | None
    b_crit: Estimate | None
    perfect_until: Estimate | None
    maximal_from: Estimate | None
    problem: str | None  # why there is no fit
    sentence: str = ""


def regimes(records: Iterable[RunRecord]) -> list[Regimes]:
    """Return one fit per task, target and kind of recipe that was run with more than one batch."""
    tries = [record for record in records if record.spec.traits.exact and groups.attempted(record)]
    families: dict[tuple[str, str, float], list[RunRecord]] = {}
    for record in tries:
        family = (groups.task_name(record), groups.recipe_variant(record), record.target)
        families.setdefault(family, []).append(record)
    kinds: dict[tuple[str, float], int] = {}
    for task, _, target in families:
        kinds[task, target] = kinds.get((task, target), 0) + 1
    return [
        _regimes(task, recipe if kinds[task, target] > 1 else "", group)
        for (task, recipe, target), group in families.items()
        if len({groups.batch(record) for record in group}) > 1
    ]


def curve(fit: Regimes, batches: Sequence[float]) -> list[float]:
    """S(B) of the fit; empty if there is no fit."""
    if fit.s_min is None or fit.b_crit is None:
        return []
    return [fit.s_min.value * (1 + fit.b_crit.value / batch) for batch in batches]


def _regimes(task: str, recipe: str, group: Sequence[RunRecord]) -> Regimes:
    sizes: dict[int, list[RunRecord]] = {}
    for record in group:
        sizes.setdefault(groups.batch(record), []).append(record)
    points = [_batch_point(size, sizes[size]) for size in sorted(sizes)]
    tuned = any(len(set(map(groups.recipe_key, found))) > 1 for found in sizes.values())
    label = ", ".join(filter(None, [recipe, "lr tuned" if tuned else ""]))
    first, problem = group[0], _problem(points)
    made = Regimes(
        task, label, first.target, first.metric_name, points, None, None, None, None, problem=problem
    )
    if made.problem is None:
        made = _fitted(made)
    return made._replace(sentence=_sentence(made))


def _fitted(made: Regimes) -> Regimes:
    s_min, b_crit = estimate(tuple(seen for point in made.points if (seen := _observed(point))))
    return made._replace(
        s_min=s_min,
        b_crit=b_crit,
        perfect_until=Estimate(*(PERFECT * value for value in b_crit)),
        maximal_from=Estimate(*(MAXIMAL * value for value in b_crit)),
    )


def _observed(point: BatchPoint) -> Observation | None:
    if point.steps is not None:
        return Observation(point.batch, point.steps, point.spread)
    return Observation(point.batch, point.bound, censored=True) if point.bound else None


def _batch_point(size: int, group: Sequence[RunRecord]) -> BatchPoint:
    """The point of the best recipe; Shallue et al. tune for each batch, too."""
    recipes: dict[str, list[RunRecord]] = {}
    for record in group:
        recipes.setdefault(groups.recipe_key(record), []).append(record)
    tried = [_tried(size, found) for found in recipes.values()]
    arrived = [point for point in tried if point.steps is not None]
    if arrived:
        return min(arrived, key=lambda point: (point.steps or math.inf, point.recipe_line))
    bounds = [point.bound for point in tried if point.bound is not None]
    # the steps of the best learning rate are only known to exceed the smallest bound
    best = min(tried, key=lambda point: (-point.reached / point.of, point.recipe_line))
    return best._replace(bound=min(bounds, default=None))


def _tried(size: int, group: Sequence[RunRecord]) -> BatchPoint:
    arrived = [record for record in group if groups.succeeded(record)]
    late = [record for record in group if not groups.succeeded(record)]
    values = [each.steps for record in arrived if (each := crossing(record)) is not None]
    found = censored(values, [record.steps for record in late])
    # a run that diverged would never have reached the target: it gives no bound
    bounds = [record.steps for record in late if record.status != "diverged"]
    return BatchPoint(
        batch=size,
        steps=found.median if found else None,
        low=found.low if found else None,
        high=found.high if found else None,
        reached=len(arrived),
        of=len(group),
        bound=None if found else min(bounds, default=None),
        spread=_spread(found, arrived),
        recipe_line=group[0].recipe_line,
    )


def _spread(found: Summary | None, arrived: Sequence[RunRecord]) -> float:
    """The spread of log steps: between seeds, and from the distance between evaluations."""
    if found is None:
        return 0.0
    seeds = math.log(found.high / found.low) / 2 if found.low > 0 else 0.0
    crossings = [each.spread for record in arrived if (each := crossing(record)) is not None]
    return math.hypot(seeds, max(crossings, default=0.0))


def _problem(points: Sequence[BatchPoint]) -> str | None:
    reached = sum(point.steps is not None for point in points)
    if reached == 0:
        return (
            f"none of {formatting.plural(len(points), 'batch', 'batches')} reached the target in "
            f"most of its runs"
        )
    if reached < FEWEST:
        return (
            f"only {formatting.plural(reached, 'batch', 'batches')} reached the target; a fit needs {FEWEST}"
        )
    return None


def _sentence(fit: Regimes) -> str:
    if fit.problem or fit.perfect_until is None or fit.maximal_from is None:
        return f"No regimes: {fit.problem}."
    least, most = fit.points[0].batch, fit.points[-1].batch
    return f"{_perfect(fit.perfect_until, least, most)} {_maximal(fit.maximal_from, least, most)}"


def _perfect(until: Estimate, least: int, most: int) -> str:
    if until.value < least:
        text = f"From batch {least:,}, the smallest that was run, doubling the batch does not halve the steps"
        return text + (f" (at best up to {rounded(until.high)})." if until.high > least else ".")
    if until.value > most:
        text = f"Up to batch {most:,}, the largest that was run, doubling the batch halves the steps"
        return text + (f" (for sure up to {rounded(until.low)})." if until.low < most else ".")
    return f"Up to batch {about(until)} doubling the batch about halves the steps."


def _maximal(start: Estimate, least: int, most: int) -> str:
    if start.value > most:
        return f"The batch from which more brings nothing is beyond the {most:,} that were run."
    if start.value < least:
        return f"From batch {least:,}, the smallest that was run, a larger one brings almost nothing."
    return f"From batch {about(start)} on a larger one brings almost nothing."


def about(value: Estimate) -> str:
    """`430 (370 to 490)`, with two digits; an upper end that is not determined is left out."""
    if value.high > OPEN * value.value:
        return f"{rounded(value.value)} (at least {rounded(value.low)})"
    return f"{rounded(value.value)} ({rounded(value.low)} to {rounded(value.high)})"


def rounded(value: float) -> str:
    """The value with two digits, as precise as a fit is: `430`, `12,000`, `0.43`."""
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.2g}"
