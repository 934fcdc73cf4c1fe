"""Time to the target: measured, or the samples that it takes over the samples per second of a cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from manyhands.analysis import groups, scaling
from manyhands.analysis.crossing import Crossing, crossing
from manyhands.analysis.groups import Key
from manyhands.analysis.trajectories import learned
from manyhands.core import formatting
from manyhands.core.statistics import NOISY, USUAL_NOISE, USUAL_SEEDS, Summary, measured, ratio, summary
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Block


class ToTarget(NamedTuple):
    """What a cell needs to reach the target, with its best recipe if several were tried."""

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
    worker_seconds: float | None
    money: float | None
    runs: tuple[str, ...]  # those that tried; of another cell where this one would make the same steps
    recipes: int = 1  # how many were tried; this is the best one
    recipe_line: str = ""
    noisy: bool = False
    workers_text: str = ""
    diverged: int = 0  # runs that did
    cell: str | None = None  # the key of the cell, if its speed was measured in pairs
    basis: str = ""  # of the seconds: "3 runs", "3 seeds x 6 paired rounds"
    ranks: int = 1

    @property
    def best_seconds(self) -> float | None:
        """Seconds to the target; None if it was not reached, or not timed."""
        return self.seconds.median if self.seconds else None


class _Work(NamedTuple):
    """The runs of one cell, and the runs that tell what it learns."""

    task: str
    key: Key
    group: list[RunRecord]
    tries: list[RunRecord]
    blocks: Sequence[Block]
    price: float | None

    @property
    def timed(self) -> list[RunRecord]:
        return [record for record in self.group if groups.measured(record)]

    @property
    def cell(self) -> str | None:
        return scaling.measured_in(self.group, self.blocks)


def to_target(
    records: Iterable[RunRecord], price: float | None = None, blocks: Sequence[Block] = ()
) -> list[ToTarget]:
    """Return one row per cell and target, for cells of which it is known what they learn."""
    everything = list(records)
    found = []
    for task in groups.tasks(everything):
        mine = groups.of_task(everything, task)
        for key, group in groups.cells(mine).items():
            tries = _tries(mine, group, blocks)
            for target in dict.fromkeys(record.target for record in tries):
                these = [record for record in tries if record.target == target]
                found.append(_best(_Work(task, key, group, these, blocks, price)))
    return found


def _tries(mine: Sequence[RunRecord], group: Sequence[RunRecord], blocks: Sequence[Block]) -> list[RunRecord]:
    """The runs that tell what a cell learns: its own, or those of cells that make the same steps."""
    own = [record for record in group if groups.attempted(record)]
    cell = scaling.measured_in(group, blocks)
    speed = next((record for record in group if record.cell == cell), group[0]) if cell else group[0]
    if cell is None and (own or not any(map(groups.measured, group))):
        return own
    return learned(mine, speed)


def censored(values: Sequence[float], bounds: Sequence[float]) -> Summary | None:
    """Summarize values of which some are only known to exceed a bound; None if half or more are not known.

    A run that did not reach the target is later than all that did, so it is placed last: the median is exact
    as long as it belongs to a run that reached the target, and `high` is a lower bound.
    """
    if len(values) <= len(bounds):
        return None
    last = max([*values, *bounds])
    return summary([*values, *[last] * len(bounds)])


def _best(work: _Work) -> ToTarget:
    recipes: dict[str, list[RunRecord]] = {}
    for record in work.tries:
        recipes.setdefault(groups.recipe_key(record), []).append(record)
    tried = [_one(work._replace(tries=found)) for found in recipes.values()]
    return min(tried, key=_order)._replace(recipes=len(tried))


def _order(one: ToTarget) -> tuple[bool, bool, float, float, str]:
    """Sort key: recipes whose median run reached the target first, then timed ones, then the fastest."""
    untimed = one.best_seconds is None
    if one.steps is None:
        return True, untimed, -one.reached / one.of, 0.0, one.recipe_line
    return False, untimed, one.best_seconds or 0.0, one.steps.median, one.recipe_line


def _one(work: _Work) -> ToTarget:
    key, tries, first = work.key, work.tries, work.group[0]
    steps = _arrived(tries, lambda found: found.steps, lambda record: record.steps)
    samples = _arrived(tries, lambda found: found.samples, lambda record: record.samples)
    own = [record for record in tries if groups.key(record) == key and groups.measured(record)]
    timed = [] if work.cell else own
    speed = timed or work.timed
    step_seconds = None if not speed else _step_seconds(speed, work.blocks)
    seconds, basis = _seconds(work, timed, samples)
    worker_seconds = None if seconds is None else groups.cores_held(first) * seconds.median
    return ToTarget(
        *(work.task, key.variant, key.workers, key.threads, key.batch),
        target=tries[0].target,
        metric_name=tries[0].metric_name,
        reached=sum(map(groups.succeeded, tries)),
        of=len(tries),
        steps=steps,
        samples=samples,
        seconds=seconds,
        step_seconds=step_seconds,
        worker_seconds=worker_seconds,
        money=None if worker_seconds is None or work.price is None else work.price * worker_seconds / 3600,
        runs=groups.runs(tries),
        recipe_line=tries[0].recipe_line,
        noisy=any((record.machine_noise or 0.0) > NOISY for record in timed),
        workers_text=groups.workers_text(first),
        diverged=sum(record.status == "diverged" for record in tries),
        cell=work.cell,
        basis=basis,
        ranks=first.spec.ranks,
    )


def _seconds(work: _Work, timed: Sequence[RunRecord], samples: Summary | None) -> tuple[Summary | None, str]:
    """Seconds to the target and what they come from: runs that were timed, or samples and speed."""
    direct = _arrived(timed, lambda each: each.seconds, lambda record: record.training_seconds, USUAL_NOISE)
    if direct is not None:
        return direct, formatting.plural(direct.n, "run")
    tried = any(map(groups.attempted, work.timed)) and not timed and not work.cell
    if samples is None or not work.timed or tried:  # a recipe that was not timed beside one that was
        return None, ""
    speed, how = scaling.throughput(work.timed, work.blocks)
    return ratio(samples, speed), f"{formatting.plural(samples.n, 'seed')} x {how}"


def _arrived(
    group: Sequence[RunRecord],
    value: Callable[[Crossing], float | None],
    bound: Callable[[RunRecord], float],
    usual: float = 0.0,
) -> Summary | None:
    """When the runs reached the target, with the noise of seeds and of the distance between evaluations.

    Runs that did not arrive move the median and the upper end to later. Without a `usual` noise, the values
    are steps or samples: a run that repeats another one with the same seed tells nothing new.
    """
    arrived = [
        (record, found) for record in group if groups.succeeded(record) and (found := crossing(record))
    ]
    told = [(record.spec.seed, number) for record, each in arrived if (number := value(each)) is not None]
    numbers = [number for _, number in (told if usual else dict.fromkeys(told))]
    late = [(record.spec.seed, bound(record)) for record in group if not groups.succeeded(record)]
    middle = censored(numbers, [number for _, number in (late if usual else dict.fromkeys(late))])
    if middle is None or not all(numbers):
        return middle
    noise = measured(numbers, max(each.spread for _, each in arrived), usual or USUAL_SEEDS)
    low, high = middle.median / noise.median * noise.low, middle.median / noise.median * noise.high
    return middle._replace(low=min(middle.low, low), high=max(middle.high, high))


def _step_seconds(timed: Sequence[RunRecord], blocks: Sequence[Block]) -> Summary:
    """Seconds per step; asynchronous workers make several steps at the same time."""
    rate, _ = scaling.throughput(timed, blocks)
    first = timed[0]
    size = first.samples / max(1, first.steps)
    return Summary(size / rate.median, size / rate.high, size / rate.low, rate.n)
