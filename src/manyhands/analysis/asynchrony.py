"""Asynchronous strategies compared with the synchronous one: what staleness costs, what not waiting saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.groups import Key
from manyhands.analysis.target import ToTarget, to_target
from manyhands.core.registry.strategies import DATA_PARALLEL, ONE_WORKER, having
from manyhands.core.statistics import Summary
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Block


class Asynchrony(NamedTuple):
    """The staleness of a cell, and the samples and seconds that it needed to reach the target."""

    task: str
    variant: str
    workers: int
    batch: int
    staleness: float
    samples: Summary | None
    seconds: Summary | None
    samples_ratio: float | None  # relative to the synchronous cell named in `against`
    seconds_ratio: float | None
    histogram: dict[int, int]  # updates by staleness
    against: str = ""  # "allreduce, 2 workers" or "single"
    same_recipe: bool = True  # as what it is compared with: otherwise staleness is not the only difference
    reached: int = 0
    of: int = 0


def asynchronous(records: Iterable[RunRecord], blocks: Sequence[Block] = ()) -> list[Asynchrony]:
    """Return all asynchronous cells, and the synchronous cells that they are compared with."""
    everything = list(records)
    found = []
    for task in groups.tasks(everything):
        mine = groups.of_task(everything, task)
        if any(record.spec.traits.asynchronous for record in mine):
            found += _of_task(task, mine, blocks)
    return found


def _of_task(task: str, mine: Sequence[RunRecord], blocks: Sequence[Block]) -> list[Asynchrony]:
    arrivals = {_key(each): each for each in to_target(mine, None, blocks)}
    shown = (*having("asynchronous"), DATA_PARALLEL)
    cells = groups.cells(record for record in mine if record.spec.strategy in shown)
    recipes = {record.run: groups.recipe_key(record) for record in mine}
    return [_row(task, key, group, arrivals, recipes) for key, group in cells.items()]


def _row(
    task: str,
    key: Key,
    group: Sequence[RunRecord],
    arrivals: dict[Key, ToTarget],
    recipes: dict[str, str],
) -> Asynchrony:
    histogram: Counter[int] = Counter()
    for record in group:
        histogram.update(record.staleness)
    updates = sum(histogram.values())
    mine, other = arrivals.get(key), _synchronous(key, arrivals)
    return Asynchrony(
        *(task, key.variant, key.workers, key.batch),
        staleness=sum(stale * count for stale, count in histogram.items()) / updates if updates else 0.0,
        samples=mine.samples if mine else None,
        seconds=mine.seconds if mine else None,
        samples_ratio=_ratio(mine.samples, other.samples) if mine and other else None,
        seconds_ratio=_ratio(mine.seconds, other.seconds) if mine and other else None,
        histogram=dict(sorted(histogram.items())),
        against=_named(other) if other else "",
        same_recipe=_recipes(mine, recipes) == _recipes(other, recipes) if mine and other else True,
        reached=mine.reached if mine else 0,
        of=mine.of if mine else 0,
    )


def _synchronous(key: Key, arrivals: dict[Key, ToTarget]) -> ToTarget | None:
    """Return `allreduce` with the same workers and batch; if it was not run, one worker with that batch."""
    return arrivals.get(key._replace(variant=DATA_PARALLEL)) or arrivals.get(
        key._replace(variant=ONE_WORKER, workers=1)
    )


def _key(arrival: ToTarget) -> Key:
    return Key(arrival.variant, arrival.workers, arrival.threads, arrival.batch)


def _recipes(arrival: ToTarget, recipes: dict[str, str]) -> set[str]:
    return {recipes[run] for run in arrival.runs}


def _named(arrival: ToTarget) -> str:
    return f"{arrival.variant}, {arrival.workers_text}"


def _ratio(over: Summary | None, under: Summary | None) -> float | None:
    return over.median / under.median if over and under and under.median else None
