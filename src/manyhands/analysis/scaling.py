"""What more workers gain and cost: throughput, speed-up over named baselines, strong and weak scaling.

Speeds that were measured in pairs are compared in pairs; others by the runs of their cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from manyhands.analysis import groups, pairs
from manyhands.analysis.groups import Key
from manyhands.core import formatting
from manyhands.core.registry.strategies import ONE_WORKER
from manyhands.core.statistics import NOISY, Summary, measured, ratio
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Block

Kind = Literal["strong", "weak"]
MILLION = 1e6


class Baseline(NamedTuple):
    """The throughput of one worker, with one thread or with all cores as threads."""

    threads: int
    throughput: Summary
    batch: int
    name: str
    variant: str = ONE_WORKER
    cell: str | None = None  # the key of the cell, if it was measured in pairs

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
    cell: str | None = None  # the key of the cell, if it was measured in pairs
    how: str = ""  # "6 paired rounds", "1 run"


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


def baselines(
    records: Iterable[RunRecord], task: str, batch: int | None, blocks: Sequence[Block] = ()
) -> Pair:
    """Return one worker with one thread and with all cores as threads, at this batch or else the fastest.

    One worker is one worker, whatever its strategy is called; `single` is preferred.
    """
    alone = [record for record in groups.of_task(records, task) if groups.measured(record) and _alone(record)]
    one = [record for record in alone if groups.threads(record) == 1]
    every = [record for record in alone if groups.threads(record) == record.environment.cores > 1]
    return _baseline(one, batch, blocks), _baseline(every, batch, blocks)


def points(
    records: Iterable[RunRecord], task: str, price: float | None = None, blocks: Sequence[Block] = ()
) -> list[Point]:
    """Return one point per timed cell of a task, summarized over its repeats or its paired rounds."""
    mine = groups.of_task(records, task)
    known: dict[int, Pair] = {}
    found = []
    for key, group in groups.cells(filter(groups.measured, mine)).items():
        if key.batch not in known:
            known[key.batch] = baselines(mine, task, key.batch, blocks)
        found.append(_point(key, group, known[key.batch], price, blocks))
    return found


def curves(
    records: Iterable[RunRecord], price: float | None = None, blocks: Sequence[Block] = ()
) -> list[Curve]:
    """Return all strong and weak scaling curves with at least two worker counts."""
    everything = list(records)
    found = []
    for task in groups.tasks(everything):
        mine = groups.of_task(everything, task)
        cells = groups.cells(filter(groups.measured, mine))
        kinds: tuple[Kind, ...] = ("strong", "weak")
        for kind in kinds:
            for variant, threads, fixed in _families(cells, kind):
                pair = baselines(mine, task, fixed, blocks)
                keys = _members(cells, kind, variant, threads, fixed)
                line = [_point(key, cells[key], pair, price, blocks) for key in keys]
                if len(line) > 1:
                    found.append(Curve(task, variant, kind, fixed, *pair, line, threads))
    return found


def times_as_fast(one: Point, other: Point) -> Summary:
    """How many times as fast one is as the other; by their speed-ups if these were measured in pairs."""
    if one.cell and other.cell and one.speed_up and other.speed_up:
        return ratio(one.speed_up, other.speed_up)
    return ratio(one.throughput, other.throughput)


def measured_in(group: Sequence[RunRecord], blocks: Sequence[Block]) -> str | None:
    """The key of the paired cell among the records of a cell; None if none was measured in pairs."""
    known = {block.cell for block in blocks}
    return next((record.cell for record in group if record.paired and record.cell in known), None)


def throughput(group: Sequence[RunRecord], blocks: Sequence[Block] = ()) -> tuple[Summary, str]:
    """Samples per second of a cell, and how they were measured: `6 paired rounds`, `3 runs`."""
    found = pairs.cell_speed(blocks, cell) if (cell := measured_in(group, blocks)) else None
    if found is not None:
        return found, formatting.plural(found.n, "paired round")
    return measured([record.throughput for record in group]), formatting.plural(len(group), "run")


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


def _alone(record: RunRecord) -> bool:
    return groups.one_plain_worker(groups.variant(record), record.spec.workers)


def _baseline(alone: Sequence[RunRecord], batch: int | None, blocks: Sequence[Block]) -> Baseline | None:
    plain = [record for record in alone if groups.variant(record) == ONE_WORKER] or alone
    cells = {key.batch: group for key, group in reversed(groups.cells(plain).items())}
    if not cells:
        return None
    rates = {size: throughput(found, blocks)[0] for size, found in cells.items()}
    chosen = batch if batch in rates else max(rates, key=lambda size: rates[size].median)
    assert chosen is not None
    group = cells[chosen]
    threads = groups.threads(group[0])
    name = "one worker, one thread" if threads == 1 else f"one worker, all {threads} cores as threads"
    which = groups.variant(group[0]), measured_in(group, blocks)
    return Baseline(threads, rates[chosen], chosen, name, *which)


def _point(
    key: Key, group: Sequence[RunRecord], pair: Pair, price: float | None, blocks: Sequence[Block]
) -> Point:
    first, (rate, how), cell = group[0], throughput(group, blocks), measured_in(group, blocks)
    speed_up, against = (_over(key, rate, cell, baseline, blocks) for baseline in pair)
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
        cell=cell,
        how=how,
    )


def _over(
    key: Key, rate: Summary, cell: str | None, baseline: Baseline | None, blocks: Sequence[Block]
) -> Summary | None:
    if baseline is None:
        return None
    if key == (baseline.variant, 1, baseline.threads, baseline.batch):
        return Summary(1.0, 1.0, 1.0, rate.n)  # a cell compared with itself: the noise cancels
    found = pairs.compare_cells(blocks, cell, baseline.cell) if cell and baseline.cell else None
    return found.ratio if found else ratio(rate, baseline.throughput)
