"""Accuracy by batch size: what linear scaling and warm-up keep, and what is lost without them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.core.statistics import Summary, summary
from manyhands.records.record import RunRecord


class Generalization(NamedTuple):
    """The metric at the end of training with one recipe and batch; its best rate where several were tried."""

    task: str
    recipe: str
    batch: int
    metric: Summary  # of the runs that did not diverge; not a number, of none, where all did
    diverged: int
    of: int
    drop: float | None  # against the same recipe's smallest batch; above zero is worse
    metric_name: str = "accuracy"
    higher_is_better: bool = True
    runs: tuple[str, ...] = ()


def generalization(records: Iterable[RunRecord]) -> list[Generalization]:
    """By task, recipe and batch, of synchronous runs that had an epoch at least and went to their end.

    What was stopped at its target says nothing about what would have become of it.
    """
    families: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        ended = record.status != "target" and groups.attempted(record)
        if record.spec.traits.exact and ended:
            family = groups.task_name(record), groups.recipe_variant(record)
            families.setdefault(family, []).append(record)
    return [row for (task, recipe), alike in families.items() for row in _rows(task, recipe, alike)]


def _rows(task: str, recipe: str, alike: Sequence[RunRecord]) -> list[Generalization]:
    sizes: dict[int, list[RunRecord]] = {}
    for record in alike:
        sizes.setdefault(groups.batch(record), []).append(record)
    rows = [_best(task, recipe, size, sizes[size]) for size in sorted(sizes)]
    return [row._replace(drop=_drop(rows[0], row)) for row in rows]


def _best(task: str, recipe: str, size: int, alike: Sequence[RunRecord]) -> Generalization:
    rates: dict[str, list[RunRecord]] = {}
    for record in alike:
        rates.setdefault(groups.recipe_key(record), []).append(record)
    return max((_row(task, recipe, size, found) for found in rates.values()), key=_goodness)


def _row(task: str, recipe: str, size: int, alike: Sequence[RunRecord]) -> Generalization:
    diverged = sum(record.status == "diverged" for record in alike)
    ended = [record.metric for record in alike if record.metric is not None and record.status != "diverged"]
    metric = summary(ended) if ended else Summary(math.nan, math.nan, math.nan, 0)
    return Generalization(
        *(task, recipe, size, metric, diverged, len(alike), None),
        metric_name=alike[0].metric_name,
        higher_is_better=groups.higher_is_better(alike[0]),
        runs=groups.runs(alike),
    )


def _goodness(row: Generalization) -> tuple[bool, float, tuple[str, ...]]:
    """Rates with which most runs survive come first."""
    if not row.metric.n:
        return False, 0.0, row.runs
    sign = 1 if row.higher_is_better else -1
    return 2 * row.diverged < row.of, sign * row.metric.median, row.runs


def _drop(first: Generalization, row: Generalization) -> float | None:
    if not first.metric.n or not row.metric.n:
        return None
    sign = 1 if row.higher_is_better else -1
    return sign * (first.metric.median - row.metric.median)
