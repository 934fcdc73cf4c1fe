"""How long a running study still takes: estimates per cell, corrected by the cells that have finished.

    cell    |- start -|------- run -------|-|        start: processes, calibration, repeats of noisy runs
    clock   begin                          end       run:   the record's seconds

What finished cells took to start is taken for the next ones. How much slower they ran than in runs of earlier
days is applied to all estimates that are based on such runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from manyhands.records.record import RunRecord
from manyhands.records.study_results import Cell
from manyhands.study import estimate
from manyhands.study.estimate import CellTime, EarlierRuns, Pairing, nearest

FACTS = 300  # runs that estimates are based on
RECENT = 5  # cells whose times are learned from
OVERRUN = 0.1  # a cell that takes longer than estimated is assumed to take this share of its time more


class _Running(NamedTuple):
    cell: Cell
    since: float
    like: EarlierRuns | None
    time: CellTime | None


class Remaining:
    """Told when cells begin and end; asked for the seconds until the last one ends."""

    def __init__(
        self,
        earlier: Iterable[EarlierRuns],
        budget: float | None = None,
        pairing: Pairing = Pairing(),  # noqa: B008 (a plain value)
    ) -> None:
        self._facts, self._pairing = list(earlier)[:FACTS], pairing
        self._paired: dict[str, list[float]] = {}  # by task, when each paired cell began
        self._others, self._budget = estimate.load(), budget
        self._began: float | None = None  # the first cell
        self._running: dict[str, _Running] = {}
        self._starts: list[float] = []
        self._slower: list[float] = []
        self._left = 0.0  # seconds of the cells that have not begun
        self._average: float | None = None  # seconds of one cell

    def begin(self, cell: Cell, now: float) -> None:
        """A cell begins."""
        self._began = now if self._began is None else self._began
        like = nearest(cell.spec, self._facts)
        self._running[cell.key] = _Running(cell, now, like, self._time(cell, like))
        if cell.paired:
            self._paired.setdefault(cell.spec.task, []).append(now)

    def end(self, cell: Cell, record: RunRecord | None, now: float) -> None:
        """A cell ends, with a record or without."""
        running = self._running.pop(cell.key, None)
        if running is None or record is None:
            return
        like = running.like
        if not cell.paired:  # such a cell sleeps most of the time
            self._starts.append(max(0.0, now - running.since - record.seconds))
        if like is not None and not like.today and estimate.same_way(cell.spec, like):
            self._slower.append(estimate.rate_of(cell.spec, like) / max(1e-9, record.samples_per_second))
        self._facts = [*estimate.known([record], today=True), *self._facts][:FACTS]

    def plan(self, left: Iterable[Cell]) -> None:
        """Estimate the cells that have not begun; those that cannot be take as long as the others."""
        cells = list(left)
        running = [each.time for each in self._running.values()]
        known = [time.seconds for time in map(self._time, cells) if time]
        times = [*known, *(time.seconds for time in running if time)]
        self._average = statistics.fmean(times) if times else None
        self._left = math.fsum(known) + (len(cells) - len(known)) * (self._average or 0.0)

    def seconds(self, now: float) -> float | None:
        """The seconds until the last cell ends; None if nothing is known yet."""
        if self._average is None:
            return None
        sure, elastic = 0.0, self._left  # the budget ends paired cells too
        for each in list(self._running.values()):  # it is asked for by other threads too
            elapsed = self._elapsed(each, now)
            whole = each.time.seconds if each.time else self._average
            rest = max(whole - elapsed, OVERRUN * elapsed)
            sure, elastic = (sure, elastic + rest) if each.cell.paired else (sure + rest, elastic)
        if self._budget is None:
            return sure + elastic
        spent = 0.0 if self._began is None else now - self._began
        return sure + min(elastic, max(0.0, self._budget - spent - sure))

    def _elapsed(self, running: _Running, now: float) -> float:
        """What a cell has had of the time since it began: paired cells share it, because they take turns."""
        if not running.cell.paired:
            return now - running.since
        began = self._paired[running.cell.spec.task]
        return (now - began[0]) / len(began)

    def _time(self, cell: Cell, like: EarlierRuns | None = None) -> CellTime | None:
        spec = cell.spec
        like = like or nearest(spec, self._facts)
        if cell.paired:
            return self._pairing.time_of(spec, like, self._slowness(cell, like) if like else 1.0)
        if like is None:
            return None
        time = estimate.time_of(spec, like, self._slowness(cell, like))
        starts = self._starts[-RECENT:]
        return time._replace(start=statistics.fmean(starts)) if starts else time

    def _slowness(self, cell: Cell, like: EarlierRuns) -> float:
        """How many times as long it takes as the earlier run: as for the last cells, or by the load."""
        if like.today:
            return 1.0
        if self._slower:
            return max(1.0, statistics.median(self._slower[-RECENT:]))
        return estimate.crowding(cell.spec, self._others)
