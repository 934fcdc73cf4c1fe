"""Time to the target: seconds per step times steps, over all repeats and seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.crossing import Crossing, crossing
from manyhands.analysis.groups import Key
from manyhands.core.statistics import NOISY, Summary, measured, summary
from manyhands.records.record import RunRecord


class ToTarget(NamedTuple):
    """What a cell needed to reach the target, with its best recipe if several were tried."""

    task: str
    variant: str
    workers: int
    threads: int
    batch: int
    target: float
    metric_name: str
    reached: int  # runs that reached the target
    of: int  # runs that tried
    steps: Summary | None
    samples: Summary | None
    seconds: Summary | None
    step_seconds: Summary | None
    predicted: float | None  # seconds per step x steps
    worker_seconds: float | None
    money: float | None
    runs: tuple[str, ...]
    recipes: int = 1  # how many were tried; this is the best one
    recipe_line: str = ""
    noisy: bool = False
    workers_text: str = ""

    @property
    def best_seconds(self) -> float | None:
        """Seconds to the target: measured, or else predicted."""
        return self.seconds.median if self.seconds else self.predicted


def to_target(records: Iterable[RunRecord], price: float | None = None) -> list[ToTarget]:
    """Return one row per cell and target, for runs that tried to reach it."""
    everything = list(records)
    found = []
    for task in groups.tasks(everything):
        tries = filter(groups.attempted, groups.of_task(everything, task))
        for key, group in groups.cells(tries).items():
            for target in dict.fromkeys(record.target for record in group):
                mine = [record for record in group if record.target == target]
                found.append(_best(task, key, mine, price))
    return found


def censored(values: Sequence[float], bounds: Sequence[float]) -> Summary | None:
    """Summarize values of which some are only known to exceed a bound; None if half or more are not known.

    A run that did not reach the target is later than all that did, so it is placed last: the median is exact
    as long as it belongs to a run that reached the target, and `high` is a lower bound.
    """
    if len(values) <= len(bounds):
        return None
    last = max([*values, *bounds])
    return summary([*values, *[last] * len(bounds)])


def _best(task: str, key: Key, group: Sequence[RunRecord], price: float | None) -> ToTarget:
    recipes: dict[str, list[RunRecord]] = {}
    for record in group:
        recipes.setdefault(groups.recipe_key(record), []).append(record)
    tried = [_one(task, key, found, price) for found in recipes.values()]
    return min(tried, key=_order)._replace(recipes=len(tried))


def _order(one: ToTarget) -> tuple[bool, bool, float, float, str]:
    """Sort key: recipes whose median run reached the target first, then timed ones, then the fastest."""
    untimed = one.best_seconds is None
    if one.steps is None:
        return True, untimed, -one.reached / one.of, 0.0, one.recipe_line
    return False, untimed, one.best_seconds or 0.0, one.steps.median, one.recipe_line


def _one(task: str, key: Key, group: Sequence[RunRecord], price: float | None) -> ToTarget:
    first = group[0]
    timed = [record for record in group if groups.measured(record)]
    steps = _censored(group, lambda found: found.steps, lambda record: record.steps)
    seconds = _seconds(timed)
    step_seconds = measured([_step_seconds(record) for record in timed]) if timed else None
    predicted = step_seconds.median * steps.median if step_seconds and steps else None
    spent = seconds.median if seconds else predicted
    worker_seconds = None if spent is None else groups.cores_held(first) * spent
    return ToTarget(
        *(task, key.variant, key.workers, key.threads, key.batch, first.target, first.metric_name),
        reached=sum(map(groups.succeeded, group)),
        of=len(group),
        steps=steps,
        samples=_censored(group, lambda found: found.samples, lambda record: record.samples),
        seconds=seconds,
        step_seconds=step_seconds,
        predicted=predicted,
        worker_seconds=worker_seconds,
        money=None if worker_seconds is None or price is None else price * worker_seconds / 3600,
        runs=groups.runs(group),
        recipe_line=first.recipe_line,
        noisy=any((record.machine_noise or 0.0) > NOISY for record in timed),
        workers_text=groups.workers_text(first),
    )


def _censored(
    group: Sequence[RunRecord],
    value: Callable[[Crossing], float | None],
    bound: Callable[[RunRecord], float],
) -> Summary | None:
    crossings = [found for record in group if groups.succeeded(record) and (found := crossing(record))]
    arrived = [number for found in crossings if (number := value(found)) is not None]
    late = [bound(record) for record in group if not groups.succeeded(record)]
    return censored(arrived, late)


def _seconds(timed: Sequence[RunRecord]) -> Summary | None:
    """Seconds to the target, with the noise of the machine and of the distance between evaluations."""
    found = _censored(timed, lambda each: each.seconds, lambda record: record.training_seconds)
    crossings = [each for record in timed if groups.succeeded(record) and (each := crossing(record))]
    values = [each.seconds for each in crossings if each.seconds]
    if found is None or not values:
        return found
    noise = measured(values, max(each.spread for each in crossings))
    median = found.median  # runs that did not arrive move it, and the upper end, to later
    down, up = noise.median / noise.low, noise.high / noise.median
    return Summary(median, min(found.low, median / down), max(found.high, median * up), found.n)


def _step_seconds(record: RunRecord) -> float:
    """Seconds per step of the run; asynchronous workers make several steps at the same time."""
    return record.samples / max(1, record.steps) / record.throughput
