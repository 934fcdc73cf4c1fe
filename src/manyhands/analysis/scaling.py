"""What more workers gain and cost: throughput, speed-up over named baselines, strong and weak scaling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.groups import Key
from manyhands.core.registry.strategies import ONE_WORKER
from manyhands.core.statistics import NOISY, Summary, measured, ratio
from manyhands.records.record import RunRecord

Kind = Literal["strong", "weak"]
MILLION = 1e6


class Baseline(NamedTuple):
    """The throughput of one worker, with one thread or with all cores as threads."""

    threads: int
    throughput: Summary
    batch: int
    name: str

    @property
    def spoken(self) -> str:
        """The name within a sentence: `one worker with one thread`."""
        return self.name.replace(", ", " with ", 1)


class Point(NamedTuple):
    """The throughput of a cell over its repeats, its speed-up and its cost."""

    variant: str
    workers: int
    ranks: int
    threads: int
    batch: int
    throughput: Summary
    speed_up: Summary | None
    efficiency: float | None  # speed-up per computing thread
    against_threads: Summary | None  # speed-up over one worker with all cores as threads
    worker_seconds: float  # per million samples
    money: float | None
    noisy: bool
    runs: tuple[str, ...]
    cores: int = 0  # of one host
    crowded: bool = False  # more threads than cores
    workers_text: str = ""  # "2 workers + 1 server"


class Curve(NamedTuple):
    """Throughput by number of workers, with a fixed global batch (strong) or batch per worker (weak)."""

    task: str
    variant: str
    kind: Kind
    fixed: int
    baseline: Baseline | None
    threads_baseline: Baseline | None
    points: list[Point]
    threads: int = 1


Pair = tuple[Baseline | None, Baseline | None]


def baselines(records: Iterable[RunRecord], task: str, batch: int | None) -> Pair:
    """Return one worker with one thread and with all cores as threads, at this batch or else the fastest."""
    alone = [
        record
        for record in groups.of_task(records, task)
        if groups.measured(record) and groups.variant(record) == ONE_WORKER
    ]
    one = [record for record in alone if groups.threads(record) == 1]
    every = [record for record in alone if groups.threads(record) == record.environment.cores > 1]
    return _baseline(one, batch), _baseline(every, batch)


def points(records: Iterable[RunRecord], task: str, price: float | None = None) -> list[Point]:
    """Return one point per timed cell of a task, summarized over its repeats."""
    mine = groups.of_task(records, task)
    known: dict[int, Pair] = {}
    found = []
    for key, group in groups.cells(filter(groups.measured, mine)).items():
        if key.batch not in known:
            known[key.batch] = baselines(mine, task, key.batch)
        found.append(_point(key, group, known[key.batch], price))
    return found


def curves(records: Iterable[RunRecord], price: float | None = None) -> list[Curve]:
    """Return all strong and weak scaling curves with at least two worker counts."""
    everything = list(records)
    found = []
    for task in groups.tasks(everything):
        mine = groups.of_task(everything, task)
        cells = groups.cells(filter(groups.measured, mine))
        kinds: tuple[Kind, ...] = ("strong", "weak")
        for kind in kinds:
            for variant, threads, fixed in _families(cells, kind):
                pair = baselines(mine, task, fixed)
                keys = _members(cells, kind, variant, threads, fixed)
                line = [_point(key, cells[key], pair, price) for key in keys]
                if len(line) > 1:
                    found.append(Curve(task, variant, kind, fixed, *pair, line, threads))
    return found


def fixed_of(key: Key, kind: Kind) -> int | None:
    """The global batch, or the batch per worker; None if the workers do not divide the batch."""
    if kind == "strong":
        return key.batch
    return key.batch // key.workers if key.batch % key.workers == 0 else None


def _families(cells: Iterable[Key], kind: Kind) -> list[tuple[str, int, int]]:
    """Return variant, threads and fixed batch of every curve that has a point with several workers."""
    found: dict[tuple[str, int, int], None] = {}
    for key in cells:
        fixed = fixed_of(key, kind)
        if key.workers > 1 and fixed is not None:
            found[key.variant, key.threads, fixed] = None
    return list(found)


def _members(cells: Iterable[Key], kind: Kind, variant: str, threads: int, fixed: int) -> list[Key]:
    """The cells of a curve by workers; `single` is used if the strategy did not run with one worker."""
    there = [key for key in cells if key.threads == threads and fixed_of(key, kind) == fixed]
    line = [key for key in there if key.variant == variant]
    if all(key.workers > 1 for key in line):
        line += [key for key in there if key.variant == ONE_WORKER]
    return sorted(line, key=lambda key: key.workers)


def _baseline(alone: Sequence[RunRecord], batch: int | None) -> Baseline | None:
    sizes: dict[int, list[RunRecord]] = {}
    for record in alone:
        sizes.setdefault(groups.batch(record), []).append(record)
    if not sizes:
        return None
    rates = {size: _throughput(found) for size, found in sizes.items()}
    chosen = batch if batch in rates else max(rates, key=lambda size: rates[size].median)
    assert chosen is not None
    threads = groups.threads(sizes[chosen][0])
    name = "one worker, one thread" if threads == 1 else f"one worker, all {threads} cores as threads"
    return Baseline(threads, rates[chosen], chosen, name)


def _point(key: Key, group: Sequence[RunRecord], pair: Pair, price: float | None) -> Point:
    first, rate = group[0], _throughput(group)
    speed_up, against = (_over(key, rate, baseline) for baseline in pair)
    seconds = groups.cores_held(first) * MILLION / rate.median
    return Point(
        *(key.variant, key.workers, first.spec.ranks, key.threads, key.batch),
        throughput=rate,
        speed_up=speed_up,
        efficiency=speed_up.median / (key.workers * key.threads) if speed_up else None,
        against_threads=against,
        worker_seconds=seconds,
        money=None if price is None else price * seconds / 3600,
        noisy=any((record.machine_noise or 0.0) > NOISY for record in group),
        runs=groups.runs(group),
        cores=first.environment.cores,
        crowded=groups.crowded(first),
        workers_text=groups.workers_text(first),
    )


def _over(key: Key, rate: Summary, baseline: Baseline | None) -> Summary | None:
    if baseline is None:
        return None
    if key == (ONE_WORKER, 1, baseline.threads, baseline.batch):
        return Summary(1.0, 1.0, 1.0, rate.n)  # a run compared with itself: the noise cancels
    return ratio(rate, baseline.throughput)


def _throughput(group: Sequence[RunRecord]) -> Summary:
    return measured([record.throughput for record in group])
