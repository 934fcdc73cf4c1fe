"""Run a timed cell, and run it again if the machine was busy: the machine is calibrated before and after."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from manyhands.core import formatting
from manyhands.core.statistics import NOISY
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Cell
from manyhands.study import calibration
from manyhands.study.attempt import is_settled
from manyhands.study.journal_history import History
from manyhands.study.study_state import CellState

AGAIN = 2  # a cell is repeated at most this often because the machine was busy
REPEATING, GRACE = 0.25, 30.0  # at most this share of the time goes into repeats, or this many seconds
FRESH = 1.0  # seconds for which a calibration is also valid for the next cell


class TimedTracker(Protocol):
    """The part of `Execution` that journals and shows the progress of timed cells."""

    @property
    def path(self) -> Path: ...

    @property
    def spent(self) -> float: ...

    def start(self, entry: CellState) -> str: ...

    def attempt(self, entry: CellState, name: str, tried: bool) -> RunRecord | None: ...

    def repeat(self, cell: Cell, name: str, noise: float) -> None: ...

    def kept(self, event: dict[str, Any], cell: Cell) -> RunRecord | None: ...

    def finish(self, entry: CellState, name: str, record: RunRecord, noise: float) -> None: ...

    def note(self, entry: CellState, text: str) -> None: ...


class Try(NamedTuple):
    """One run of a timed cell."""

    run: str  # the name of its folder
    noise: float  # by how much the machine was slower than at its best
    record: RunRecord
    seconds: float


class TimedCells:
    """Runs timed cells, one at a time."""

    def __init__(
        self,
        tracker: TimedTracker,
        history: History,
        journal: Callable[..., None],
        budget: float | None,
    ) -> None:
        self._tracker, self._history, self._journal, self._budget = tracker, history, journal, budget
        self._calibrated = -FRESH  # time of the last calibration
        self._repeating = 0.0  # seconds spent on repeats

    def run(self, entry: CellState) -> None:
        """Run a cell, and repeat it if the machine was busy; the run with the least noise counts."""
        cell, tracker = entry.cell, self._tracker
        tries = self._earlier_tries(cell)
        while not tries or self._worth_another(tries):
            before = self._before(cell, again=bool(tries))
            name, began = tracker.start(entry), time.monotonic()
            record = tracker.attempt(entry, name, tried=bool(tries))
            if record is None:
                break
            seconds = time.monotonic() - began
            noise = (before + self._calibrate()) / 2 / self._history.best - 1
            if tries:
                self._repeating += seconds
            tries.append(Try(name, noise, record, max(seconds, record.seconds)))
            if self._worth_another(tries):
                tracker.repeat(cell, name, noise)
                slower = f"the machine was {formatting.percent(noise)} slower than at its best"
                tracker.note(entry, f"running it again: {slower}")
        if not tries:
            return
        best = min(reversed(tries), key=lambda each: each.noise)
        for each in tries:
            if each is not best and each.run not in self._history.repeated_runs(cell):
                tracker.repeat(cell, each.run, each.noise)
        tracker.finish(entry, best.run, best.record, best.noise)

    def _earlier_tries(self, cell: Cell) -> list[Try]:
        """Return the runs of an earlier session that was stopped before it chose one of them."""
        found = []
        for event in self._history.repeated(cell):
            record = self._tracker.kept(event, cell)
            if record is not None:
                found.append(Try(event["run"], event["noise"], record, record.seconds))
        return found

    def _worth_another(self, tries: list[Try]) -> bool:
        if min(each.noise for each in tries) <= NOISY or len(tries) > AGAIN:
            return False
        if tries[-1].record.status == "diverged":
            return False
        spent, more = self._tracker.spent, tries[-1].seconds
        if self._repeating + more > max(GRACE, REPEATING * spent):  # for machines that are always busy
            return False
        return self._budget is None or spent + more <= self._budget

    def _before(self, cell: Cell, again: bool) -> float:
        """Return the calibration before a run of a cell: a new one, or the last one if it is still valid."""
        if self._history.calibrations and is_settled(self._tracker.path / self._history.free_name(cell)):
            return self._history.last  # killed before its end was journaled: the machine was measured then
        if again:  # the last calibration belongs to the run that was too noisy
            return self._calibrate()
        if time.monotonic() - self._calibrated < FRESH:
            return self._history.last
        if not self._history.calibrations:  # twice, so that the best time is not that of one unlucky moment
            self._calibrate()
        return self._calibrate()

    def _calibrate(self) -> float:
        seconds = calibration.measure()
        event = {"seconds": round(seconds, 6), "host": socket.gethostname()}
        self._journal("calibration", **event)
        self._history.take({"event": "calibration", **event})
        self._calibrated = time.monotonic()
        return seconds
