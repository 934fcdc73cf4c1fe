"""Run a study one cell at a time, with a journal, so that it can continue wherever it was stopped."""

from __future__ import annotations

import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from manyhands.callbacks.base import Callback
from manyhands.core import formatting
from manyhands.core.errors import DataUnavailableError, InterruptedRunError, ManyhandsError
from manyhands.core.statistics import NOISY
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Cell, JournalWriter, Results, StudyFolder
from manyhands.study import calibration
from manyhands.study.attempt import CannotWorkError, attempt, in_own_process, is_settled, ruled_out, tidy
from manyhands.study.grid import unique
from manyhands.study.journal_history import History
from manyhands.study.parallel_cells import run_parallel
from manyhands.study.study_file import Study
from manyhands.study.study_state import CellState, StudyState

AGAIN = 2  # a cell is repeated at most this often because the machine was busy
REPEATING, GRACE = 0.25, 30.0  # at most this share of the time goes into repeats, or this many seconds
FRESH = 1.0  # seconds for which a calibration is also valid for the next cell


class StudyView(Protocol):
    """The interface of a view that shows the progress of a study."""

    def begun(self, state: StudyState, folder: Path) -> None: ...

    def callback(self, entry: CellState) -> Callback: ...

    def changed(self, entry: CellState) -> None: ...

    def note(self, entry: CellState, text: str) -> None: ...

    def say(self, text: str) -> None: ...

    def tick(self) -> None:
        """Called regularly while cells run in other processes."""

    def close(self) -> None: ...


class Try(NamedTuple):
    """One run of a timed cell."""

    run: str  # the name of its folder
    noise: float  # by how much the machine was slower than at its best
    record: RunRecord
    seconds: float


def execute(study: Study, out: Path, view: StudyView, jobs: int = 1) -> Results:
    """Run the cells that have no result yet; a cell that fails is journaled, and the others still run."""
    folder = StudyFolder(out)
    with folder.writing() as journal:
        running = Execution(study, folder, journal, view)
        try:
            running.run(jobs)
        except (InterruptedRunError, KeyboardInterrupt) as error:
            raise _interrupted(running.state, error) from error
        finally:
            view.close()
    return folder.read()


def _interrupted(state: StudyState, error: BaseException) -> InterruptedRunError:
    number = error.signal_number if isinstance(error, InterruptedRunError) else signal.SIGINT
    count = len(state.of("finished", "failed"))
    all_ = len(state.entries) - len(state.of("excluded"))
    how = "run the same command to continue the study"
    return InterruptedRunError(
        f"interrupted after {count} of {formatting.plural(all_, 'cell')}; {how}", number
    )


class Execution:
    """One session of a study."""

    def __init__(self, study: Study, folder: StudyFolder, journal: JournalWriter, view: StudyView) -> None:
        self._study, self._folder, self._journal, self._view = study, folder, journal, view
        self._history = History(folder.events(), socket.gethostname())
        self._began: float | None = None  # when the first cell began: every session runs at least one
        self._calibrated = -FRESH  # time of the last calibration
        self._repeating = 0.0  # seconds spent on repeats
        self.state = StudyState(study)

    def run(self, jobs: int) -> None:
        """Run all cells that are left one at a time; untimed ones with one rank, `jobs` at a time."""
        self._open(self._with_fallback(self._study.cells))
        self._view.begun(self.state, self._folder.path)
        left = self.state.of("left")
        together = [
            entry for entry in left if jobs > 1 and not entry.cell.timed and entry.cell.spec.ranks == 1
        ]
        for entry in left:
            if entry not in together and not self.is_over():
                self._take(entry)
        if together and not self.is_over():
            run_parallel(together, jobs, self)
        if reason := self._over():
            count = len(self.state.of("left"))
            if count:
                self._journal.write("over", reason=reason)
                self._view.say(
                    f"{reason}: {formatting.plural(count, 'cell')} left; run the same command to continue"
                )

    # ------------------------------------------------------------------ opening the study
    def _with_fallback(self, cells: list[Cell]) -> list[Cell]:
        """Return the cells, with the fallback task in those whose data are unavailable."""
        fallback = self._study.fallback
        if fallback is None:
            return cells
        missing: set[str] = set()
        for cell in cells:
            spec = cell.spec
            if spec.task == fallback or spec.task in missing or self._history.is_finished(cell):
                continue
            from manyhands.tasks import find

            try:
                find.build(spec.task, spec.options)
            except DataUnavailableError as error:
                self._view.say(f"{error}\nusing {fallback} instead of {spec.task}")
                missing.add(spec.task)
        found = []
        for cell in cells:
            lacking = cell.spec.task in missing and not self._history.is_finished(cell)
            found.append(
                cell._replace(spec=cell.spec.replace(task=fallback, options={})) if lacking else cell
            )
        return unique(found)

    def _open(self, cells: list[Cell]) -> None:
        study, entries = self._study, self.state.entries
        everything = [*cells, *(without.cell for without in study.excluded)]
        self._journal.write(
            "study",
            name=study.name,
            title=study.title,
            about=study.about,
            claim=study.claim,
            price=study.price,
            currency=study.currency,
            command=sys.argv,
            cells=[cell.to_json() for cell in everything],
        )
        for cell in cells:
            entry = entries[cell.key] = CellState(cell)
            event = self._history.finished(cell)
            record = self._kept(event, cell) if event else None
            if event and record is not None:
                entry.state, entry.record, entry.earlier = "finished", record, True
                self._tidy(event["run"])
        for cell, reason in study.excluded:
            entries[cell.key] = CellState(cell, "excluded", reason=reason)
            self._exclude(cell, reason)

    def _kept(self, event: dict[str, Any], cell: Cell) -> RunRecord | None:
        """Return the record of an earlier session; if it is damaged, the cell is run again."""
        try:
            return self._folder.record(event, cell)
        except ManyhandsError as error:
            self._view.say(f"{error}; its cell is run again")
            return None

    # ------------------------------------------------------------------ one cell
    def _take(self, entry: CellState) -> None:
        if reason := ruled_out(entry.cell.spec):
            self._fail(entry, "excluded", "", reason)
            return
        self.begin(entry)
        if entry.cell.timed:
            self._timed(entry)
            return
        name = self.start(entry)
        self.end(entry, name, lambda: self._attempt(entry, name))

    def _timed(self, entry: CellState) -> None:
        """Run a timed cell, and repeat it if the machine was busy; the run with the least noise counts."""
        cell = entry.cell
        tries = self._earlier_tries(cell)
        while not tries or self._worth_another(tries):
            before = self._before(cell, again=bool(tries))
            name, began = self.start(entry), time.monotonic()
            record = self._outcome(entry, name, partial(self._attempt, entry, name), bool(tries))
            if record is None:
                break
            seconds = time.monotonic() - began
            noise = (before + self._calibrate()) / 2 / self._history.best - 1
            if tries:
                self._repeating += seconds
            tries.append(Try(name, noise, record, max(seconds, record.seconds)))
            if self._worth_another(tries):
                self._again(cell, tries[-1])
                slower = f"the machine was {formatting.percent(noise)} slower than at its best"
                self._view.note(entry, f"running it again: {slower}")
        if not tries:
            return
        best = min(reversed(tries), key=lambda each: each.noise)
        for each in tries:
            if each is not best and each.run not in self._history.repeated_runs(cell):
                self._again(cell, each)
        self.finish(entry, best.run, best.record, best.noise)

    def _earlier_tries(self, cell: Cell) -> list[Try]:
        """Return the runs of an earlier session that was stopped before it chose one of them."""
        found = []
        for event in self._history.repeated(cell):
            record = self._kept(event, cell)
            if record is not None:
                found.append(Try(event["run"], event["noise"], record, record.seconds))
        return found

    def _worth_another(self, tries: list[Try]) -> bool:
        if min(each.noise for each in tries) <= NOISY or len(tries) > AGAIN:
            return False
        if tries[-1].record.status == "diverged":
            return False
        budget, spent, more = self._study.budget, self._spent(), tries[-1].seconds
        if self._repeating + more > max(GRACE, REPEATING * spent):  # for machines that are always busy
            return False
        return budget is None or spent + more <= budget

    def _again(self, cell: Cell, done: Try) -> None:
        self._write("repeated", cell, run=done.run, noise=round(done.noise, 4))
        self._tidy(done.run)

    def _attempt(self, entry: CellState, name: str) -> RunRecord:
        return attempt(in_own_process(entry.cell.spec), self._folder.path / name, self._view.callback(entry))

    def _outcome(
        self, entry: CellState, name: str, result: Callable[[], RunRecord], tried: bool = False
    ) -> RunRecord | None:
        """Return the record of a run; if it fails, journal the reason, unless an earlier try has a record."""
        try:
            return result()
        except InterruptedRunError:
            raise
        except CannotWorkError as error:
            self._fail(entry, "excluded", name, str(error))
        except Exception as error:  # noqa: BLE001 (a task's own code may raise anything: other cells still run)
            text = str(error) if isinstance(error, ManyhandsError) else f"{type(error).__name__}: {error}"
            if not tried:
                self._fail(entry, "failed", name, text)
        return None

    def _fail(self, entry: CellState, state: Any, name: str, reason: str) -> None:
        entry.state, entry.reason = state, reason
        if state == "excluded":
            self._exclude(entry.cell, reason)
        else:
            self._write("failed", entry.cell, run=name, reason=reason)
        self._view.changed(entry)

    # ------------------------------------------------------------------ also called for parallel cells
    @property
    def path(self) -> Path:
        """The study's folder."""
        return self._folder.path

    def begin(self, entry: CellState) -> None:
        """Begin a cell; if it failed before, delete what that run has left."""
        if name := self._history.failed_run(entry.cell):
            shutil.rmtree(self._folder.path / name, ignore_errors=True)
        self._began = self._began or time.monotonic()
        entry.state, entry.reason = "running", ""
        self._view.changed(entry)

    def start(self, entry: CellState) -> str:
        """Journal that a run of the cell starts, and return the name of its folder."""
        name = self._history.free_name(entry.cell)
        self._write("started", entry.cell, run=name)
        return name

    def end(self, entry: CellState, name: str, result: Callable[[], RunRecord]) -> None:
        """Journal the outcome of a cell."""
        record = self._outcome(entry, name, result)
        if record is not None:
            self.finish(entry, name, record)

    def finish(self, entry: CellState, name: str, record: RunRecord, noise: float | None = None) -> None:
        """Journal a cell's result, and delete the files of its run that are not needed anymore."""
        rounded = None if noise is None else round(max(0.0, noise), 4)
        event = self._write("finished", entry.cell, run=name, noise=rounded, timed=entry.cell.timed)
        entry.state, entry.record = "finished", self._folder.record(event, entry.cell)
        self._tidy(name)
        self._view.changed(entry)

    def tick(self) -> None:
        """Let the view update itself."""
        self._view.tick()

    def is_over(self) -> bool:
        """Whether the budget is spent, so that no further cell may begin."""
        return self._over() is not None

    # ------------------------------------------------------------------ helpers
    def _spent(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    def _over(self) -> str | None:
        budget = self._study.budget
        if budget is None or self._spent() < budget:
            return None
        return f"the budget of {formatting.duration(budget)} is spent"

    def _before(self, cell: Cell, again: bool) -> float:
        """Return the calibration before a run of a cell: a new one, or the last one if it is still valid."""
        if self._history.calibrations and is_settled(self._folder.path / self._history.free_name(cell)):
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
        self._journal.write("calibration", **event)
        self._history.take({"event": "calibration", **event})
        self._calibrated = time.monotonic()
        return seconds

    def _write(self, event: str, cell: Cell, **fields: Any) -> dict[str, Any]:
        content = {"cell": cell.key, **fields}
        self._journal.write(event, **content)
        self._history.take({"event": event, **content})
        return content

    def _exclude(self, cell: Cell, reason: str) -> None:
        if self._history.excluded(cell) != reason:
            self._write("excluded", cell, reason=reason)

    def _tidy(self, name: str) -> None:
        if not self._study.keep_models:
            tidy(self._folder.path / name)
