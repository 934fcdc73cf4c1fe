"""Accuracy by batch size, with and without linear scaling and warm-up of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.core.statistics import Summary, summary
from manyhands.records.record import RunRecord


class Generalization(NamedTuple):
    """The final metric with one recipe and batch, at the best learning rate that was tried."""

    task: str
    recipe: str
    batch: int
    metric: Summary  # over the runs that did not diverge; NaN with n = 0 if all of them did
    diverged: int
    of: int
    drop: float | None  # relative to the smallest batch of the same recipe; positive is worse
    metric_name: str = "accuracy"
    higher_is_better: bool = True
    runs: tuple[str, ...] = ()


def generalization(records: Iterable[RunRecord]) -> list[Generalization]:
    """Return one row per task, recipe and batch, from synchronous runs that trained to their end.

    Runs of less than one epoch do not count, nor do runs that were to stop at the target. The final metric of
    those that reached it is unknown, and only the bad ones among them would be left.
    """
    families: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        stopped = record.status == "target" or record.spec.stop_at_target
        ended = not stopped and groups.attempted(record)
        if record.spec.traits.exact and ended:
            family = groups.task_name(record), groups.recipe_variant(record)
            families.setdefault(family, []).append(record)
    return [row for (task, recipe), group in families.items() for row in _rows(task, recipe, group)]


def _rows(task: str, recipe: str, group: Sequence[RunRecord]) -> list[Generalization]:
    sizes: dict[int, list[RunRecord]] = {}
    for record in group:
        sizes.setdefault(groups.batch(record), []).append(record)
    rows = [_best(task, recipe, size, sizes[size]) for size in sorted(sizes)]
    return [row._replace(drop=_drop(rows[0], row)) for row in rows]


def _best(task: str, recipe: str, size: int, group: Sequence[RunRecord]) -> Generalization:
    rates: dict[str, list[RunRecord]] = {}
    for record in group:
        rates.setdefault(groups.recipe_key(record), []).append(record)
    return max((_row(task, recipe, size, found) for found in rates.values()), key=_goodness)


def _row(task: str, recipe: str, size: int, group: Sequence[RunRecord]) -> Generalization:
    diverged = sum(record.status == "diverged" for record in group)
    ended = [record.metric for record in group if record.metric is not None and record.status != "diverged"]
    metric = summary(ended) if ended else Summary(math.nan, math.nan, math.nan, 0)
    return Generalization(
        *(task, recipe, size, metric, diverged, len(group), None),
        metric_name=group[0].metric_name,
        higher_is_better=groups.higher_is_better(group[0]),
        runs=groups.runs(group),
    )


def _goodness(row: Generalization) -> tuple[bool, float, tuple[str, ...]]:
    """Sort key: learning rates with which most runs did not diverge are better than all others."""
    if not row.metric.n:
        return False, 0.0, row.runs
    sign = 1 if row.higher_is_better else -1
    return 2 * row.diverged < row.of, sign * row.metric.median, row.runs


def _drop(first: Generalization, row: Generalization) -> float | None:
    if not first.metric.n or not row.metric.n:
        return None
    sign = 1 if row.higher_is_better else -1
    return sign * (first.metric.median - row.metric.median)
