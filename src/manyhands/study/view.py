"""What a person sees of a study: a growing table on a terminal, one line per cell elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from manyhands.callbacks.base import Callback
from manyhands.core import formatting
from manyhands.core.statistics import NOISY
from manyhands.records.record import Start, StepRecord
from manyhands.records.study_results import Without
from manyhands.study import estimate, table
from manyhands.study.execute import StudyView
from manyhands.study.study_state import CellState, StudyState, cell_title

REFRESH = 1.0  # seconds; more often only costs the runs time
FACTS = 300  # earlier runs that time left is judged by


def for_people() -> StudyView:
    """A live table where standard error is a terminal, lines where it is a file or a pipe."""
    console = Console(stderr=True, highlight=False)
    return LiveTable(console) if console.is_terminal else LineByLine()


class NoView:
    """The null view."""

    def begun(self, sheet: StudyState, folder: Path) -> None:
        """Nothing."""

    def callback(self, entry: CellState) -> Callback:
        """Nobody."""
        return Callback()

    def changed(self, entry: CellState) -> None:
        """Nothing."""

    def note(self, entry: CellState, text: str) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def tick(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class LineByLine:
    """A line when a cell begins and one when it ends."""

    def __init__(self) -> None:
        self._sheet: StudyState | None = None
        self._count = 0

    def begun(self, sheet: StudyState, folder: Path) -> None:
        """What lies ahead."""
        self._sheet, self._count = sheet, len(sheet.entries) - len(sheet.of("excluded"))
        self.say(headline(sheet, folder))

    def callback(self, entry: CellState) -> Callback:
        """One that passes notices on."""
        return _Watcher(self.say, lambda note: None)

    def changed(self, entry: CellState) -> None:
        """A line."""
        assert self._sheet is not None
        if entry.state == "running":
            number = list(self._sheet.entries).index(entry.cell.key) + 1
            self.say(f"[{number}/{self._count}] {cell_title(entry.cell)}")
        elif entry.state == "excluded":
            self.say(f"excluded: {cell_title(entry.cell)}: {entry.reason}")
        else:
            self.say(f"      {outcome(entry)}")

    def note(self, entry: CellState, text: str) -> None:
        """A line."""
        self.say(f"      {text}")

    def say(self, text: str) -> None:
        """One line, or several."""
        print(formatting.printed(text), file=sys.stderr, flush=True)

    def tick(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing is held."""


class LiveTable:
    """The rows of the task at hand that fit, what is running, what is left; drawn about once a second."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._sheet: StudyState | None = None
        self._live: Live | None = None
        self._facts: list[estimate.EarlierRuns] = []
        self._notes: dict[str, str] = {}
        self._task = ""
        self._block: list[str] = []
        self._left: tuple[float, float] | None = None  # seconds, and when that was said
        self._drawn = 0.0

    def begun(self, sheet: StudyState, folder: Path) -> None:
        """The headline stays; below it the table."""
        self._sheet = sheet
        self.say(headline(sheet, folder))
        recent = estimate.earlier([entry.cell for entry in sheet.of("left")], folder)
        self._facts = estimate.known([*sheet.records, *recent])[:FACTS]
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self._count()
        self._draw()

    def callback(self, entry: CellState) -> Callback:
        """One that keeps the line of a running cell."""
        return _Watcher(self.say, partial(self.note, entry))

    def changed(self, entry: CellState) -> None:
        """Draw it."""
        self._task = entry.cell.spec.task
        self._notes.pop(entry.cell.key, None)
        if entry.state == "finished" and entry.record is not None:
            self._facts = [*estimate.known([entry.record]), *self._facts][:FACTS]
        self._count()
        self._draw()

    def note(self, entry: CellState, text: str) -> None:
        """Beside the running cell."""
        self._notes[entry.cell.key] = text
        self.tick()

    def say(self, text: str) -> None:
        """A line above the table."""
        self._console.print(formatting.printed(text), markup=False, soft_wrap=True)

    def tick(self) -> None:
        """Draw it anew if that was a while ago."""
        if time.monotonic() - self._drawn >= REFRESH:
            self._draw()

    def close(self) -> None:
        """Take the table away: it is printed as a whole."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _count(self) -> None:
        """What changes with a cell only."""
        assert self._sheet is not None
        failed = [Without(entry.cell, entry.reason) for entry in self._sheet.of("failed")]
        blocks = table.blocks(self._sheet.records, failed)
        mine = [block for block in blocks if block.task.split(" ")[0] == self._task] or blocks[-1:]
        width = self._console.width - 1
        self._block = [line for block in mine for line in table.draw(block, width, footnote=False)]
        left = [entry.cell for entry in self._sheet.of("left", "running")]
        time_ = estimate.estimate(left, self._facts)
        whole = time_.seconds * len(left) / len(time_.by_cell) if time_.by_cell else None
        self._left = None if whole is None else (whole, time.monotonic())

    def _draw(self) -> None:
        live = self._live  # a run's follower draws, too, in a thread of its own
        if live is None:
            return
        self._drawn = time.monotonic()
        lines = [Text(formatting.line(line), no_wrap=True) for line in self.lines()]
        live.update(Group(*lines), refresh=True)

    def lines(self) -> list[str]:
        """As many rows as fit, the last ones, between their header and what is running."""
        assert self._sheet is not None
        width, height = self._console.width - 1, self._console.height
        running = [
            table.cut(f" ▸ {cell_title(entry.cell)}  {self._notes.get(entry.cell.key, '')}".rstrip(), width)
            for entry in self._sheet.of("running")[:4]
        ]
        below = [*running, table.cut(" " + self._counts(), width)]
        header, rows = self._block[:1], self._block[1:]
        room = max(1, height - len(below) - len(header) - 2)
        return [*header, *rows[-room:], *below]

    def _counts(self) -> str:
        assert self._sheet is not None
        sheet = self._sheet
        parts = [f"{len(sheet.of('finished'))} done"]
        parts += [f"{count} running"] if (count := len(sheet.of("running"))) else []
        parts += [f"{len(sheet.of('left'))} left"]
        parts += [f"{count} failed"] if (count := len(sheet.of("failed"))) else []
        if self._left is not None:
            seconds, said = self._left
            parts.append(f"about {formatting.duration(max(1.0, seconds - (time.monotonic() - said)))} to go")
        return " · ".join(parts)


class _Watcher(Callback):
    """An observer that says in a few words how far a run is."""

    def __init__(self, say: Callable[[str], None], note: Callable[[str], None]) -> None:
        self._say, self._note = say, note
        self._start: Start | None = None
        self._noted = 0.0

    def on_start(self, start: Start) -> None:
        """Where it begins."""
        self._start = start
        self._note("starting")

    def on_step(self, step: StepRecord) -> None:
        """Now and then, how far it is."""
        start, now = self._start, time.monotonic()
        if start is None or now - self._noted < REFRESH:
            return
        self._noted = now
        rate = (step.samples - start.samples) / max(1e-9, step.seconds - start.seconds)
        unit = "img" if start.unit == "images" else start.unit
        share = formatting.percent(min(1.0, step.samples / max(1, start.horizon)))
        self._note(f"{share}  loss {step.loss:.4f}  {formatting.rate(rate, unit)}")

    def on_notice(self, text: str) -> None:
        self._say(text)


def headline(sheet: StudyState, folder: Path) -> str:
    """`46 cells · 12 of them finished before · results/default`."""
    cells = len(sheet.entries) - len(sheet.of("excluded"))
    parts = [formatting.plural(cells, "cell")]
    if before := sum(entry.earlier for entry in sheet.entries.values()):
        parts.append(f"{before} finished before")
    if excluded := len(sheet.of("excluded")):
        parts.append(f"{excluded} excluded")
    if budget := sheet.study.budget:
        parts.append(f"at most about {formatting.duration(budget)}")
    return " · ".join([*parts, str(folder)])


def outcome(entry: CellState) -> str:
    """What has become of a cell, in a line."""
    record = entry.record
    if record is None:
        return f"{entry.state}: {entry.reason}"
    if record.status == "diverged":
        return record.message or "diverged"
    parts = [formatting.rate(record.throughput, record.unit)] if record.timed else []
    goal = formatting.threshold(record.target, record.metric_name)
    reached = table.to_target([record])
    parts += [f"{goal} {'' if reached == 'not reached' else 'after '}{reached}"] if reached else []
    if record.metric is not None:
        parts.append(f"{formatting.score(record.metric, record.metric_name)} at the end")
    if (record.machine_noise or 0.0) > NOISY:
        parts.append(f"noisy: machine {formatting.percent(record.machine_noise or 0.0)} slower")
    return " · ".join(parts)
