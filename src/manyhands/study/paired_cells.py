"""The cells of a comparison in pairs: speed is measured in blocks, learning is run once for all who share it.

A grid with `paired = true` says what is compared. Each of its specs becomes

- a speed cell: it never evaluates, and runs in blocks next to blocks of the baseline (paired.py);
- with a `target`, learning cells: runs to the target whose seconds do not count, one per seed.

A strategy that is exact makes the steps that one worker makes (law 4), so one worker's run is the learning
cell of all of them. Where dividing a batch changes what is learned (dropout, batch norm that is not
synchronized), the record of that run says so, and the others get learning cells of their own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from manyhands.analysis.crossing import crossing
from manyhands.analysis.pairs import Advantage
from manyhands.core import environment
from manyhands.core.formatting import plural
from manyhands.records.record import RunRecord
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import Cell

EPOCHS = 10_000.0  # of a speed cell: it ends when it has been measured, not by its schedule
SELDOM = 1e6  # seconds between its checkpoints
USUAL_SEEDS = 0.05  # the relative standard deviation of samples to the target between seeds, at least
HOPELESS = 100.0  # as a logarithm
UNTRIED = Advantage(-HOPELESS, 0.0)


class Baselines(NamedTuple):
    """Cells of one worker that a study lacks, and a sentence about them."""

    cells: list[Cell]
    sentence: str


def speed_cell(spec: RunSpec, label: str = "") -> Cell:
    """The cell that measures the speed of a spec."""
    measured = spec.replace(
        **{"target": None, "stop_at_target": False, "evaluate_every": 0.0, "seconds": None, "samples": None},
        **{"epochs": EPOCHS, "seed": 0, "noise_scale": False, "checkpoint_every": SELDOM},
    )
    return Cell(measured, paired=True, label=label)


def learning_cells(specs: Iterable[RunSpec]) -> list[Cell]:
    """The runs to the target from which the specs' steps are known, unless the split of a batch matters."""
    return [Cell(_trajectory(spec), timed=False) for spec in specs if spec.target is not None]


def own_learning_cells(specs: Iterable[RunSpec], records: Sequence[RunRecord]) -> list[Cell]:
    """Learning cells of the specs whose share of another run's steps is wrong, as that run's record says."""
    matters = {record.cell for record in records if record.split_matters}
    shared = [spec for spec in specs if spec.target is not None and _shares(spec)]
    wrong = [spec for spec in shared if Cell(_trajectory(spec)).key in matters]
    return [Cell(_to_target(spec), timed=False) for spec in wrong]


def advantages(
    cells: Iterable[Cell], specs: Sequence[RunSpec], records: Sequence[RunRecord]
) -> dict[str, Advantage]:
    """How many times fewer samples a cell needs to the target than one worker, as logarithms.

    Cells that share one worker's run need the same. One that did not arrive has no chance. One that makes
    steps of its own and was not tried may be as good, but the others must not be ended because of it.
    """
    found: dict[str, Advantage] = {}
    for cell in cells:
        if not cell.spec.traits.exact:
            found[cell.key] = UNTRIED
        mine = [spec for spec in specs if speed_cell(spec).spec == cell.spec and spec.target is not None]
        own = {each.key for each in [*learning_cells(mine), *own_learning_cells(mine, records)]}
        shared = {Cell(_trajectory(spec.alone())).key for spec in mine}
        tried, one = (
            [record for record in records if record.cell in keys] for keys in (own - shared, shared)
        )
        if tried:
            arrived, reference = _arrivals(tried), _arrivals(one) or _arrivals(tried)
            if 2 * len(arrived) <= len(tried):  # most of them did not arrive
                found[cell.key] = Advantage(-HOPELESS, -HOPELESS)
                continue
            fewer, reach = _mean(reference) - _mean(arrived), math.hypot(_error(reference), _error(arrived))
            found[cell.key] = Advantage(fewer - reach, fewer + reach)
    return found


def _arrivals(records: Iterable[RunRecord]) -> list[float]:
    """The logarithms of samples to the target."""
    return [math.log(found.samples) for record in records if (found := crossing(record)) is not None]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _error(logs: Sequence[float]) -> float:
    """Twice the standard error of a mean of logarithms; with one value, what seeds usually differ by."""
    if len(logs) < 2:
        return 2 * USUAL_SEEDS
    return 2 * max(USUAL_SEEDS, statistics.stdev(logs)) / math.sqrt(len(logs))


def _shares(spec: RunSpec) -> bool:
    """Whether one worker's run is this spec's learning cell."""
    return spec.traits.exact and spec.workers > 1


def _trajectory(spec: RunSpec) -> RunSpec:
    """The spec of the run that learns what this spec learns."""
    if spec.traits.exact:  # also one worker with several threads
        return _to_target(spec).alone(threads=None, strategy_options={})
    return _to_target(spec)


def _to_target(spec: RunSpec) -> RunSpec:
    return spec.replace(stop_at_target=True, seconds=None, samples=None)


def missing_baselines(cells: Sequence[Cell]) -> Baselines:
    """One worker with one thread and with all cores as threads, for every task and batch that lacks them.

    They are what several workers are compared with. A strategy with one worker is one worker, too.
    """
    found: list[Cell] = []
    for cell in cells:
        spec = cell.spec
        if not cell.timed or spec.workers == 1 or spec.device == "cuda" or cell.repeat:
            continue
        for threads in sorted({1, environment.cores()}):
            baseline = cell._replace(spec=spec.alone(threads=threads, strategy_options={}), label="")
            if not any(_is_baseline(other, baseline) for other in [*cells, *found]):
                found.append(baseline)
    tasks = ", ".join(dict.fromkeys(cell.spec.task for cell in found))
    some = plural(len(found), "cell")
    return Baselines(found, f"added {some} with one worker to compare with ({tasks})" if found else "")


def _is_baseline(cell: Cell, wanted: Cell) -> bool:
    """Whether a cell is one worker with the wanted threads, for the same work."""
    mine, spec = cell.spec, wanted.spec
    threads = mine.threads or environment.cores()
    same = (mine.task, mine.options, mine.batch, mine.workers, mine.offload)
    return (
        cell.timed
        and threads == spec.threads
        and same
        == (
            *(spec.task, spec.options, spec.batch, 1),
            spec.offload,
        )
    )
