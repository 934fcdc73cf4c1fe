"""Scaling regimes: up to which batch doubling it halves the steps, and from which batch it gains nothing.

The critical batch is a property of the task only if each batch was run at its own best learning rate.
Otherwise the curve is the recipe's: one whose rate grows with the batch needs about the same samples at every
batch by design.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.batch_points import BatchPoint, batch_point, observations, recipe_family
from manyhands.analysis.fit import FEWEST, FREEDOM, estimate
from manyhands.core import formatting
from manyhands.core.statistics import Estimate
from manyhands.records.record import RunRecord

# Scaling is perfect while a batch needs at most 20 % more samples than the smallest possible number, and
# parallelism is maximal where it needs at most 20 % more steps than the smallest possible number:
# S(B) B = S_min (B + B_crit), S(B) = S_min (1 + B_crit/B).
PERFECT = 0.2  # times B_crit
MAXIMAL = 5.0  # times B_crit
OPEN = 20.0  # times the value: an end of the interval that is farther away is not determined by the runs


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
    tuned: bool = False  # several learning rates at every batch, the best of them inside at most batches
    edge: tuple[int, ...] = ()  # batches whose best learning rate is the smallest or largest that was tried
    family: str = ""  # what the recipes of all runs have in common: see `recipe_family`


def regimes(records: Iterable[RunRecord]) -> list[Regimes]:
    """Return one fit per task, target and recipe, its learning rate apart, that has more than one batch."""
    families: dict[tuple[str, float, str], list[RunRecord]] = {}
    for record in records:
        if record.spec.traits.exact and groups.attempted(record):
            family = groups.task_name(record), record.target, recipe_family(record)
            families.setdefault(family, []).append(record)
    labels = _labels(families)
    return [
        _regimes(task, labels[task, target, family], family, group)
        for (task, target, family), group in families.items()
        if len({groups.batch(record) for record in group}) > 1
    ]


def _labels(
    families: dict[tuple[str, float, str], list[RunRecord]],
) -> dict[tuple[str, float, str], str]:
    """Name each recipe of a task and target by what distinguishes it from the others."""
    found = {}
    for task, target, family in families:
        others = [json.loads(other) for t, goal, other in families if (t, goal) == (task, target)]
        variants = {
            groups.recipe_variant(group[0])
            for (t, goal, _), group in families.items()
            if (t, goal) == (task, target)
        }
        mine = json.loads(family)
        parts = [groups.recipe_variant(families[task, target, family][0])] if len(others) > 1 else []
        if len(variants) < len(others):
            differing = [key for key in mine if any(other.get(key) != mine[key] for other in others)]
            known = ("name", "optimizer", "scaling", "warmup")  # the variant says these
            parts += [f"{key} {mine[key]}" for key in differing if key not in known]
        found[task, target, family] = ", ".join(parts)
    return found


def curve(fit: Regimes, batches: Sequence[float]) -> list[float]:
    """S(B) of the fit; empty if there is no fit."""
    if fit.s_min is None or fit.b_crit is None:
        return []
    return [fit.s_min.value * (1 + fit.b_crit.value / batch) for batch in batches]


def _regimes(task: str, recipe: str, family: str, group: Sequence[RunRecord]) -> Regimes:
    sizes: dict[int, list[RunRecord]] = {}
    for record in group:
        sizes.setdefault(groups.batch(record), []).append(record)
    points = [batch_point(size, sizes[size]) for size in sorted(sizes)]
    fitted = [point for point in points if point.steps is not None]
    edge = tuple(point.batch for point in fitted if point.edge)
    tuned = bool(fitted) and all(point.rates > 1 for point in fitted) and 2 * len(edge) < len(fitted)
    several = any(point.rates > 1 for point in points)
    label = ", ".join(filter(None, [recipe, "lr tuned" if tuned else "several lr" if several else ""]))
    first, problem = group[0], _problem(points)
    made = Regimes(
        *(task, label, first.target, first.metric_name, points, None, None, None, None),
        problem=problem,
        tuned=tuned,
        edge=edge,
        family=family,
    )
    if made.problem is None:
        made = _fitted(made)
    return made._replace(sentence=_sentence(made))


def _fitted(made: Regimes) -> Regimes:
    s_min, b_crit = estimate(observations(made.points))
    if is_open_below(b_crit) and is_open_above(b_crit):
        return made._replace(
            problem=f"the steps vary too much at these batches: any critical batch "
            f"from {rounded(b_crit.low)} to {rounded(b_crit.high)} fits them"
        )
    return made._replace(
        s_min=s_min,
        b_crit=b_crit,
        perfect_until=Estimate(*(PERFECT * value for value in b_crit)),
        maximal_from=Estimate(*(MAXIMAL * value for value in b_crit)),
    )


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
    if reached - 2 + sum(each.freedom for each in observations(points)) < FREEDOM:
        return (
            f"{formatting.plural(reached, 'batch', 'batches')} with one seed do not show how noisy they are; "
            f"a fit needs {reached + 1}, or several seeds"
        )
    return None


def opening(fits: Iterable[Regimes]) -> str:
    """The sentence about the batch for the opening answer; empty if no learning rate was tuned per batch."""
    fit = next((fit for fit in fits if fit.tuned and fit.perfect_until is not None), None)
    if fit is None or fit.perfect_until is None:
        return ""
    return " ".join(filter(None, [_beyond(fit, fit.perfect_until), edge_sentence(fit)]))


def edge_sentence(fit: Regimes) -> str:
    """At which batches a better learning rate may lie outside of those that were tried."""
    if not fit.edge or not any(point.rates > 1 for point in fit.points):
        return ""
    batches = formatting.plural(len(fit.edge), "batch", "batches").partition(" ")[2]
    return (
        f"At {batches} {_listed(fit.edge)} the best learning rate is the smallest or largest that was tried: "
        f"a better one may lie outside."
    )


def recipe_phrase(fit: Regimes) -> str:
    """What a sentence about the curve has to begin with: empty if the rate was tuned for each batch."""
    if fit.tuned:
        return ""
    several = all(point.rates > 1 for point in fit.points if point.steps is not None)
    return "For the learning rates that were tried" if several else "For this recipe"


def _sentence(fit: Regimes) -> str:
    if fit.problem or fit.perfect_until is None or fit.maximal_from is None:
        return f"No regimes: {fit.problem}."
    least, most = fit.points[0].batch, fit.points[-1].batch
    text, phrase = _perfect(fit.perfect_until, least, most), recipe_phrase(fit)
    if phrase:
        text = f"{phrase}, {text[0].lower()}{text[1:]}"
    return " ".join(filter(None, [text, _maximal(fit.maximal_from, least, most), edge_sentence(fit)]))


def _beyond(fit: Regimes, until: Estimate) -> str:
    least, most = fit.points[0].batch, fit.points[-1].batch
    if not least <= until.value <= most:
        return _perfect(until, least, most)
    return f"Beyond batch {about(until)} doubling the batch no longer halves the steps."


def _perfect(until: Estimate, least: int, most: int) -> str:
    if until.low < least and until.high > most:
        return "Up to which batch doubling it halves the steps cannot be told from these runs."
    if until.value < least:
        text = f"From batch {least:,}, the smallest that was run, doubling the batch does not halve the steps"
        return text + (f" (at best up to {rounded(until.high)})." if until.high > least else ".")
    if until.value > most:
        text = f"Up to batch {most:,}, the largest that was run, doubling the batch halves the steps"
        return text + (f" (for sure up to {rounded(until.low)})." if until.low < most else ".")
    return f"Up to batch {about(until)} doubling the batch about halves the steps."


def _maximal(start: Estimate, least: int, most: int) -> str:
    if start.value > most:
        sure = f" (from {rounded(start.low)} on is possible)" if start.low < most else ""
        return f"The batch from which more brings nothing is beyond the {most:,} that were run{sure}."
    if start.value < least:
        late = f" (at the latest from {rounded(start.high)} on)" if start.high > least else ""
        return f"From batch {least:,}, the smallest that was run, a larger one brings almost nothing{late}."
    return f"From batch {about(start)} on a larger one brings almost nothing."


def is_open_above(value: Estimate) -> bool:
    """Whether the runs do not determine how large it is at most."""
    return value.high > OPEN * value.value


def is_open_below(value: Estimate) -> bool:
    """Whether the runs do not determine how small it is at least."""
    return OPEN * value.low < value.value


def about(value: Estimate) -> str:
    """`430 (370 to 490)`, with two digits; an end that is not determined is left out."""
    if is_open_above(value) and is_open_below(value):
        return "unknown"
    if is_open_above(value):
        return f"{rounded(value.value)} (at least {rounded(value.low)})"
    if is_open_below(value):
        return f"{rounded(value.value)} (at most {rounded(value.high)})"
    return f"{rounded(value.value)} ({rounded(value.low)} to {rounded(value.high)})"


def rounded(value: float) -> str:
    """The value with two digits, as precise as a fit is: `430`, `12,000`, `0.43`."""
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.2g}"


def _listed(batches: Sequence[int]) -> str:
    """`32`, `32 and 64`, `32, 64 and 8,192`."""
    named = [f"{batch:,}" for batch in batches]
    return " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
