"""Run a study one cell at a time, with a journal, so that it can continue wherever it was stopped."""

from __future__ import annotations

import math
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from manyhands.callbacks.base import Callback
from manyhands.core import formatting
from manyhands.core.errors import DataUnavailableError, InterruptedRunError, ManyhandsError
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Block, Cell, JournalWriter, Results, StudyFolder
from manyhands.study.attempt import CannotWorkError, attempt, in_own_process, ruled_out, tidy
from manyhands.study.grid import unique
from manyhands.study.journal_history import History
from manyhands.study.paired import PairedMeasurement, Rounds, comparisons
from manyhands.study.paired_cells import advantages, own_learning_cells
from manyhands.study.parallel_cells import run_parallel
from manyhands.study.study_file import Study
from manyhands.study.study_state import CellState, StudyState
from manyhands.study.timed_cells import TimedCells
from manyhands.study.warm_run import BlockSpeed


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
        self._timed = TimedCells(self, self._history, journal.write, study.budget)
        self.state = StudyState(study, blocks=self._history.blocks)

    def run(self, jobs: int) -> None:
        """Run all cells that are left one at a time; untimed ones with one rank, `jobs` at a time."""
        self._open(self._with_fallback(self._study.cells))
        self._view.begun(self.state, self._folder.path)
        for text in self._study.notes:
            self._view.say(text)
        self._run_cells(jobs)
        if more := own_learning_cells(self._study.compared, self.state.records):
            self._open([*self._cells, *more])
            self._run_cells(jobs)
        self._compare()
        if reason := self._over():
            count = len(self.state.of("left"))
            if count:
                self._journal.write("over", reason=reason)
                self._view.say(
                    f"{reason}: {formatting.plural(count, 'cell')} left; run the same command to continue"
                )

    def _run_cells(self, jobs: int) -> None:
        left = [entry for entry in self.state.of("left") if not entry.cell.paired]
        together = [
            entry for entry in left if jobs > 1 and not entry.cell.timed and entry.cell.spec.ranks == 1
        ]
        for entry in left:
            if entry not in together and not self.is_over():
                self._take(entry)
        if together and not self.is_over():
            run_parallel(together, jobs, self)

    def _compare(self) -> None:
        """Measure the paired cells, task by task; each has its share of the time that is left."""
        left = comparisons([entry for entry in self.state.of("left") if entry.cell.paired])
        for number, entries in enumerate(left):
            able = [entry for entry in entries if not self._rule_out(entry)]
            if not able:
                continue
            self._began = self._began or time.monotonic()
            end = math.inf if self._study.budget is None else self._began + self._study.budget
            now = time.monotonic()
            until = now + (end - now) / (len(left) - number)
            measured = PairedMeasurement(able, self._history.blocks, self._study.block, self)
            cells = [entry.cell for entry in able]
            rounds = Rounds(self._study.min_rounds, self._study.rounds)
            measured.run(rounds, until, advantages(cells, self._study.compared, self.state.records))

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
        self._cells = cells
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
        self._history.take({"event": "study"})
        for cell in cells:
            if cell.key in entries:
                continue
            entry = entries[cell.key] = CellState(cell)
            event = self._history.finished(cell)
            record = self.kept(event, cell) if event else None
            if event and record is not None:
                entry.state, entry.record, entry.earlier = "finished", record, True
                self._tidy(event["run"])
        for cell, reason in study.excluded:
            entries[cell.key] = CellState(cell, "excluded", reason=reason)
            self._exclude(cell, reason)

    def kept(self, event: dict[str, Any], cell: Cell) -> RunRecord | None:
        """Return the record of an earlier session; if it is damaged, the cell is run again."""
        try:
            return self._folder.record(event, cell)
        except ManyhandsError as error:
            self._view.say(f"{error}; its cell is run again")
            return None

    # ------------------------------------------------------------------ one cell
    def _rule_out(self, entry: CellState) -> bool:
        """Whether a cell cannot work with its task's data or model; then it is excluded."""
        reason = ruled_out(entry.cell.spec)
        if reason:
            self._fail(entry, "excluded", "", reason)
        return reason is not None

    def _take(self, entry: CellState) -> None:
        if self._rule_out(entry):
            return
        self.begin(entry)
        if entry.cell.timed:
            self._timed.run(entry)
            return
        name = self.start(entry)
        if (record := self.attempt(entry, name)) is not None:
            self.finish(entry, name, record)

    def attempt(self, entry: CellState, name: str, tried: bool = False) -> RunRecord | None:
        """Run a cell in this folder; None if it failed: that is journaled unless another try has a record."""

        def run() -> RunRecord:
            spec, folder = in_own_process(entry.cell.spec), self._folder.path / name
            return attempt(spec, folder, self._view.callback(entry))

        return self._outcome(entry, name, run, tried)

    def repeat(self, cell: Cell, name: str, noise: float) -> None:
        """Journal a run that was too noisy."""
        self._write("repeated", cell, run=name, noise=round(noise, 4))
        self._tidy(name)

    def _outcome(
        self, entry: CellState, name: str, result: Callable[[], RunRecord], tried: bool = False
    ) -> RunRecord | None:
        """Return the record of a run; if it fails, journal the reason, unless an earlier try has a record."""
        try:
            return result()
        except InterruptedRunError:
            raise
        except Exception as error:  # noqa: BLE001 (a task's own code may raise anything: other cells still run)
            if not tried or isinstance(error, CannotWorkError):
                self.fail(entry, name, error)
        return None

    def fail(self, entry: CellState, name: str, error: Exception) -> None:
        """Journal why a run has no record; the other cells still run."""
        text = str(error) if isinstance(error, ManyhandsError) else f"{type(error).__name__}: {error}"
        self._fail(entry, "excluded" if isinstance(error, CannotWorkError) else "failed", name, text)

    def _fail(self, entry: CellState, state: Any, name: str, reason: str) -> None:
        entry.state, entry.reason = state, reason
        if state == "excluded":
            self._exclude(entry.cell, reason)
        else:
            self._write("failed", entry.cell, run=name, reason=reason)
        self._view.changed(entry)

    # ------------------------------------------------------------------ also called for other kinds of cells
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

    def block(self, entry: CellState, number: int, position: int, speed: BlockSpeed) -> Block:
        """Journal a block of a paired cell."""
        rounded = {name: float(f"{value:.6g}") for name, value in speed._asdict().items() if name != "steps"}
        self._write("block", entry.cell, round=number, position=position, steps=speed.steps, **rounded)
        return self._history.blocks[-1]

    def note(self, entry: CellState, text: str) -> None:
        """Show a text beside a running cell."""
        self._view.note(entry, text)

    def tick(self) -> None:
        """Let the view update itself."""
        self._view.tick()

    def is_over(self) -> bool:
        """Whether the budget is spent, so that no further cell may begin."""
        return self._over() is not None

    # ------------------------------------------------------------------ helpers
    @property
    def spent(self) -> float:
        """Seconds since the first cell of this session began."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def _over(self) -> str | None:
        budget = self._study.budget
        if budget is None or self.spent < budget:
            return None
        return f"the budget of {formatting.duration(budget)} is spent"

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
