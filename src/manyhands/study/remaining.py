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
from manyhands.study.estimate import CellTime, EarlierRuns, nearest

FACTS = 300  # runs that estimates are based on
RECENT = 5  # cells whose times are learned from
OVERRUN = 0.1  # a cell that takes longer than estimated is assumed to take this share of its time more


class _Running(NamedTuple):
    since: float
    like: EarlierRuns | None
    time: CellTime | None


class Remaining:
    """Told when cells begin and end; asked for the seconds until the last one ends."""

    def __init__(self, earlier: Iterable[EarlierRuns], budget: float | None = None) -> None:
        self._facts = list(earlier)[:FACTS]
        self._others, self._budget = estimate.load(), budget
        self._began: float | None = None  # the first cell
        self._running: dict[str, _Running] = {}
        self._starts: list[float] = []
        self._slower: list[float] = []
        self._left = 0.0  # seconds of the cells that have not begun
        self._average: float | None = None  # seconds of one cell
        self._taking_turns: set[str] = set()

    def begin(self, cell: Cell, now: float) -> None:
        """A cell begins."""
        self._began = now if self._began is None else self._began
        if cell.paired:  # such cells take turns
            self._taking_turns.add(cell.key)
            return
        like = nearest(cell.spec, self._facts)
        self._running[cell.key] = _Running(now, like, self._time(cell, like))

    def end(self, cell: Cell, record: RunRecord | None, now: float) -> None:
        """A cell ends, with a record or without."""
        self._taking_turns.discard(cell.key)
        running = self._running.pop(cell.key, None)
        if running is None or record is None:
            return
        self._starts.append(max(0.0, now - running.since - record.seconds))
        like = running.like
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
        if self._taking_turns and self._budget is not None and self._began is not None:
            return max(0.0, self._budget - (now - self._began))  # they are measured until the time is up
        if self._average is None:
            return None
        running = 0.0
        for since, _, time in list(self._running.values()):  # it is asked for by other threads too
            elapsed = now - since
            whole = time.seconds if time else self._average
            running += max(whole - elapsed, OVERRUN * elapsed)
        if self._budget is None:
            return running + self._left
        spent = 0.0 if self._began is None else now - self._began
        return running + min(self._left, max(0.0, self._budget - spent - running))  # then none begins

    def _time(self, cell: Cell, like: EarlierRuns | None = None) -> CellTime | None:
        spec = cell.spec
        like = like or nearest(spec, self._facts)
        if like is None:
            return None
        spec = estimate.as_measured(cell, spec)
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
