"""Estimate how long cells take, from similar earlier runs or from a probe of about a second per task."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from manyhands.analysis.pairs import LOOKS
from manyhands.core import environment
from manyhands.core.errors import ManyhandsError
from manyhands.core.registry.launchers import LAUNCHERS, LOCAL
from manyhands.records.record import RunRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import Cell
from manyhands.study.paired import STEPS

CELL = 0.2  # seconds per cell for calibration and the journal
PROBE = 1.0  # seconds per probe
OTHER = 1.5  # factor on the samples to the target if the batch differs
UNLIKE = 1.25  # factor on the time if the earlier run had another strategy or other workers
AGAIN = 1.25  # factor on the time of timed cells on a busy machine: those that are too noisy are repeated
BUSY = 1.5  # a machine that is slower than alone by this factor is called busy
_MOST = 300  # at most this many records are read

# The data set of a task is known once the task is built, but building it would download the data.
_DATA = {"mnist": "mnist", "fashion": "fashion-mnist", "cifar": "cifar-10"}


class EarlierRuns(NamedTuple):
    """How fast a similar run was."""

    spec: RunSpec
    threads: int
    rate: float  # samples per second
    evaluation: float  # seconds per evaluation
    train_samples: int
    target_samples: int | None
    probed: bool = False
    today: bool = False  # in this session of the study: as busy as the machine is


class CellTime(NamedTuple):
    """The estimated seconds of one cell, on the clock."""

    start: float  # until the first step, and after the last one
    run: float  # training and evaluation

    @property
    def seconds(self) -> float:
        return self.start + self.run


class Pairing(NamedTuple):
    """How a study measures paired cells: in rounds of one block of the cell and one of the baseline."""

    block: float = 1.0  # seconds
    rounds: int = 1
    min_rounds: int = LOOKS[0]

    def within(self, seconds: float, cells: int) -> Pairing:
        """With as many rounds as so many cells can have in this time, but a few in any case."""
        fit = int(seconds / (2 * self.block * max(1, cells)))
        return self._replace(rounds=min(self.rounds, max(self.min_rounds, fit)))

    def time_of(self, spec: RunSpec, like: EarlierRuns | None, slower: float = 1.0) -> CellTime:
        """Estimate the time of one cell for all rounds: some cells are clearly slower, and end earlier."""
        block = self.block
        if like is not None and spec.batch is not None:
            block = max(block, STEPS * spec.batch * slower / rate_of(spec, like))
        return CellTime(_start(spec, slower) + block, 2 * self.rounds * block)


class CellEstimate(NamedTuple):
    """The seconds of all cells that can be estimated, and what the estimate is based on."""

    seconds: float
    runs: int  # cells that are similar to an earlier run
    probed: tuple[str, ...]  # tasks that were probed
    unknown: tuple[str, ...]  # tasks without an estimate
    by_cell: dict[str, float]
    busy: bool = False  # whether other processes make the study slower


def earlier(cells: Iterable[Cell], out: Path) -> list[RunRecord]:
    """Return the records of runs of these tasks, in this folder and in the usual ones, the latest first."""
    names = {cell.spec.name.removesuffix(cell.spec.id) for cell in cells}
    folders = (out, *sorted(Path("results").glob("*/")), Path("runs"))
    paths = {
        path.resolve(): path
        for folder in folders
        for name in names
        for path in folder.glob(f"{glob.escape(name)}*/result.json")
    }
    latest = sorted(paths.values(), key=lambda path: path.stat().st_mtime, reverse=True)[:_MOST]
    return [record for path in latest if (record := _record(path.parent))]


def _record(folder: Path) -> RunRecord | None:
    try:
        record = RunFolder(folder).record()
    except (ManyhandsError, OSError):
        return None  # other files in these folders are ignored
    return record if record and record.status in ("finished", "target") and record.throughput > 0 else None


def load() -> float:
    """How many processes wanted to run in the last minute, on average; 0 if the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0


def known(records: Iterable[RunRecord], *, today: bool = False) -> list[EarlierRuns]:
    """Return how fast the runs of these records were."""
    found = []
    for record in records:
        spent = max((phases.get("evaluation", 0.0) for phases in record.phases), default=0.0)
        evaluation = spent / max(1, len(record.curve)) or _evaluation(record.test_samples, record.throughput)
        found.append(
            EarlierRuns(
                record.spec,
                record.environment.threads,
                record.throughput,
                evaluation,
                record.train_samples,
                record.target_samples,
                today=today,
            )
        )
    return found


def estimate(
    cells: Iterable[Cell],
    facts: list[EarlierRuns],
    jobs: int = 1,
    resolved: Mapping[str, RunSpec] | None = None,
    pairing: Pairing = Pairing(),  # noqa: B008 (a plain value)
) -> CellEstimate:
    """Estimate the time for these cells, one at a time, or some of them `jobs` at a time."""
    by_cell: dict[str, float] = {}
    others = load()
    busy = others / environment.cores() >= BUSY - 1
    runs, probed, unknown = 0, dict[str, None](), dict[str, None]()
    total = 0.0
    for cell in cells:
        spec = (resolved or {}).get(cell.key, cell.spec)
        like = nearest(spec, facts)
        if like is None:
            unknown[cell.spec.task] = None
            continue
        if like.probed:
            probed[cell.spec.task] = None
        else:
            runs += 1
        slower = crowding(spec, others)
        if cell.paired:
            time = pairing.time_of(spec, like, slower).seconds
        else:
            time = time_of(spec, like, slower).seconds * (AGAIN if busy and cell.timed else 1.0)
        seconds = by_cell[cell.key] = time
        shared = jobs > 1 and not cell.timed and cell.spec.ranks == 1
        total += seconds / min(jobs, environment.cores()) if shared else seconds
    return CellEstimate(total, runs, tuple(probed), tuple(unknown), by_cell, busy)


def nearest(spec: RunSpec, facts: list[EarlierRuns]) -> EarlierRuns | None:
    """Return the most similar run of the same task, if there is one."""
    same = [
        fact
        for fact in facts
        if fact.spec.task == spec.task and {**fact.spec.options, **spec.options} == fact.spec.options
    ]

    def likeness(fact: EarlierRuns) -> tuple[bool, bool, bool, float]:
        batches = (spec.batch or fact.spec.batch or 1, fact.spec.batch or 1)
        return (
            same_way(spec, fact),
            fact.threads == threads_of(spec),
            not fact.probed,
            -abs(math.log(batches[0] / batches[1])),
        )

    return max(same, key=likeness, default=None)


def threads_of(spec: RunSpec) -> int:
    """Return the threads per worker: by default its share of the cores."""
    return spec.threads or max(1, environment.cores() // spec.ranks)


def crowding(spec: RunSpec, others: float) -> float:
    """How many times as long a run takes because of the other processes that want to run."""
    mine = _cores(spec, threads_of(spec))
    return max(1.0, (mine + others) / environment.cores())


def same_way(spec: RunSpec, like: EarlierRuns) -> bool:
    """Whether the earlier run had the same strategy and as many workers."""
    return (spec.strategy, spec.workers) == (like.spec.strategy, like.spec.workers)


def rate_of(spec: RunSpec, like: EarlierRuns) -> float:
    """Estimate samples per second, in proportion to the cores that work at a time."""
    return like.rate * _cores(spec, threads_of(spec)) / _cores(like.spec, like.threads)


def time_of(spec: RunSpec, like: EarlierRuns, slower: float = 1.0) -> CellTime:
    """Estimate the time to start, train and evaluate, until the first limit of the run is reached.

    `slower` is how many times as long everything takes as in the earlier run.
    """
    n = like.train_samples
    samples = (spec.epochs or like.spec.epochs or 1.0) * n
    if spec.samples is not None:
        samples = min(samples, spec.samples)
    same_target = spec.target is None or spec.target == like.spec.target
    if spec.stop_at_target and like.target_samples is not None and same_target:
        same_batch = (spec.batch or like.spec.batch) == like.spec.batch
        samples = min(samples, like.target_samples * (1.0 if same_batch else OTHER))
    rate = rate_of(spec, like) / slower / (1.0 if same_way(spec, like) else UNLIKE)
    training = samples / rate
    if spec.seconds is not None and training > spec.seconds:
        training, samples = spec.seconds, spec.seconds * rate
    evaluations = max(1, math.ceil(samples / (spec.evaluate_every * n))) if spec.evaluate_every else 0
    return CellTime(_start(spec, slower), training + evaluations * slower * like.evaluation)


def _start(spec: RunSpec, slower: float) -> float:
    launcher = LOCAL if LAUNCHERS[spec.launcher].in_process else spec.launcher  # as studies do
    return slower * LAUNCHERS[launcher].start_seconds + CELL


def _evaluation(samples: int, rate: float) -> float:
    """Estimate the seconds of an evaluation: the forward pass is about a third of a step."""
    return samples / (3 * rate)


def _cores(spec: RunSpec, threads: int) -> int:
    """The number of cores that work at a time; workers of a serial strategy wait for each other."""
    busy = threads if spec.traits.serial else spec.workers * threads
    return max(1, min(environment.cores(), busy))


def in_cache(task: str) -> bool:
    """Whether a task can be built without a download."""
    from manyhands.data.download import present

    data = _DATA.get(task.partition("-")[0])
    return data is None or present(data)


def probe(spec: RunSpec) -> EarlierRuns:
    """Measure the speed of one worker with one thread, for about a second on the (resolved) spec."""
    from manyhands.core.rank_info import RankInfo
    from manyhands.engine.probe import measure
    from manyhands.tasks import find

    one = spec.alone(accumulate=1, threads=1)
    task = find.build(one.task, one.options)
    rate = measure(RankInfo(), one, PROBE)
    assert rate is not None
    return EarlierRuns(one, 1, rate, _evaluation(len(task.test), rate), len(task.train), None, probed=True)
