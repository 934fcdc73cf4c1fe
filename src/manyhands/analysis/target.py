"""Time to the target: seconds per step times steps, over the repeats and seeds that were tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.groups import Key
from manyhands.core.statistics import NOISY, Summary, summary
from manyhands.records.record import RunRecord


class ToTarget(NamedTuple):
    """What it took a cell to reach the target; its best recipe where several were tried."""

    task: str
    variant: str
    workers: int
    threads: int
    batch: int
    target: float
    metric_name: str
    reached: int
    of: int
    steps: Summary | None
    samples: Summary | None
    seconds: Summary | None
    step_seconds: Summary | None
    predicted: float | None  # seconds per step x steps
    worker_seconds: float | None
    money: float | None
    runs: tuple[str, ...]
    recipes: int = 1  # how many were tried; this is the best of them
    recipe_line: str = ""
    noisy: bool = False
    workers_text: str = ""

    @property
    def best_seconds(self) -> float | None:
        """Measured, else predicted."""
        return self.seconds.median if self.seconds else self.predicted


def to_target(records: Iterable[RunRecord], price: float | None = None) -> list[ToTarget]:
    """Every cell in which the target was tried for."""
    everything = list(records)
    found = []
    for task in groups.tasks(everything):
        tries = filter(groups.attempted, groups.of_task(everything, task))
        for key, alike in groups.cells(tries).items():
            for target in dict.fromkeys(record.target for record in alike):
                mine = [record for record in alike if record.target == target]
                found.append(_best(task, key, mine, price))
    return found


def censored(values: Sequence[float], bounds: Sequence[float]) -> Summary | None:
    """The summary of values some of which are only known to lie beyond a bound; none beyond half of them.

    A run that did not arrive is later than all that did, so it stands at the end: the median is right as long
    as it is a run that arrived, and `high` is then at least what is said.
    """
    if len(values) <= len(bounds):
        return None
    last = max([*values, *bounds])
    return summary([*values, *[last] * len(bounds)])


def _best(task: str, key: Key, alike: Sequence[RunRecord], price: float | None) -> ToTarget:
    recipes: dict[str, list[RunRecord]] = {}
    for record in alike:
        recipes.setdefault(groups.recipe_key(record), []).append(record)
    tried = [_one(task, key, found, price) for found in recipes.values()]
    return min(tried, key=_order)._replace(recipes=len(tried))


def _order(one: ToTarget) -> tuple[bool, bool, float, float, str]:
    """Those whose median run arrived come first, then those that were timed, the quickest before others."""
    untimed = one.best_seconds is None
    if one.steps is None:
        return True, untimed, -one.reached / one.of, 0.0, one.recipe_line
    return False, untimed, one.best_seconds or 0.0, one.steps.median, one.recipe_line


def _one(task: str, key: Key, alike: Sequence[RunRecord], price: float | None) -> ToTarget:
    first = alike[0]
    timed = [record for record in alike if groups.measured(record)]
    steps = _censored(alike, steps_to_target, lambda record: record.steps)
    seconds = _censored(timed, lambda record: record.target_seconds, lambda record: record.training_seconds)
    step_seconds = summary([_step_seconds(record) for record in timed]) if timed else None
    predicted = step_seconds.median * steps.median if step_seconds and steps else None
    spent = seconds.median if seconds else predicted
    worker_seconds = None if spent is None else groups.cores_held(first) * spent
    return ToTarget(
        *(task, key.variant, key.workers, key.threads, key.batch, first.target, first.metric_name),
        reached=sum(map(groups.succeeded, alike)),
        of=len(alike),
        steps=steps,
        samples=_censored(alike, lambda record: record.target_samples, lambda record: record.samples),
        seconds=seconds,
        step_seconds=step_seconds,
        predicted=predicted,
        worker_seconds=worker_seconds,
        money=None if worker_seconds is None or price is None else price * worker_seconds / 3600,
        runs=groups.runs(alike),
        recipe_line=first.recipe_line,
        noisy=any((record.machine_noise or 0.0) > NOISY for record in timed),
        workers_text=groups.workers_text(first),
    )


def _censored(
    alike: Sequence[RunRecord],
    value: Callable[[RunRecord], float | None],
    bound: Callable[[RunRecord], float],
) -> Summary | None:
    arrived = [found for record in alike if groups.succeeded(record) and (found := value(record)) is not None]
    late = [bound(record) for record in alike if not groups.succeeded(record)]
    return censored(arrived, late)


def steps_to_target(record: RunRecord) -> float | None:
    """When it was reached; records of before steps were noted have the samples."""
    if record.target_steps is not None or record.target_samples is None:
        return record.target_steps
    return record.target_samples / groups.batch(record)


def _step_seconds(record: RunRecord) -> float:
    """Of a step of the run, whoever made it: at their own pace workers make several at a time."""
    return record.samples / max(1, record.steps) / record.throughput
