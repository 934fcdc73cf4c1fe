"""Show the progress of a study: a growing table on a terminal, one line per cell elsewhere, or nothing."""

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
from manyhands.callbacks.progress import share
from manyhands.core import formatting
from manyhands.core.statistics import NOISY
from manyhands.records.record import Start, StepRecord
from manyhands.records.study_results import Without
from manyhands.study import estimate, table, table_layout
from manyhands.study.execute import StudyView
from manyhands.study.remaining import Remaining
from manyhands.study.study_state import CellState, StudyState, cell_title

REFRESH = 1.0  # seconds between updates; more frequent ones would slow the runs down


def for_people() -> StudyView:
    """Return a live table if standard error is a terminal, or line-by-line output for a file or a pipe."""
    console = Console(stderr=True, highlight=False)
    return LiveTable(console) if console.is_terminal else LineByLine()


class NoView:
    """A view that shows nothing."""

    def begun(self, state: StudyState, folder: Path) -> None:
        pass

    def callback(self, entry: CellState) -> Callback:
        return Callback()

    def changed(self, entry: CellState) -> None:
        pass

    def note(self, entry: CellState, text: str) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


class LineByLine:
    """Prints a line when a cell begins and one when it ends."""

    def __init__(self) -> None:
        self._state: StudyState | None = None
        self._count = 0

    def begun(self, state: StudyState, folder: Path) -> None:
        """Print the number of cells and the folder."""
        self._state, self._count = state, len(state.entries) - len(state.of("excluded"))
        self.say(headline(state, folder))

    def callback(self, entry: CellState) -> Callback:
        """Return a callback that prints the notices of a run."""
        return _Watcher(self.say, lambda note: None)

    def changed(self, entry: CellState) -> None:
        """Print the title of a cell that begins, or the outcome of one that ends."""
        assert self._state is not None
        if entry.state == "running":
            self.say(f"[{self._number(entry)}] {cell_title(entry.cell)}")
        elif entry.state == "excluded":
            self.say(f"excluded: {cell_title(entry.cell)}: {entry.reason}")
        else:
            self.say(f"[{self._number(entry)}]  {outcome(entry)}")

    def note(self, entry: CellState, text: str) -> None:
        """Print a text about a running cell, but not the turns of paired cells: there are too many."""
        if not entry.cell.paired:
            self.say(f"[{self._number(entry)}]  {text}")

    def _number(self, entry: CellState) -> str:
        """`12/29`: several cells may run at a time, so what is said of one has its number."""
        assert self._state is not None
        return f"{list(self._state.entries).index(entry.cell.key) + 1}/{self._count}"

    def say(self, text: str) -> None:
        print(formatting.printed(text), file=sys.stderr, flush=True)

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


class LiveTable:
    """A table of the current task, the running cells and what is left; drawn about once a second."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state: StudyState | None = None
        self._live: Live | None = None
        self._remaining = Remaining([])
        self._notes: dict[str, str] = {}
        self._task = ""
        self._block: list[str] = []
        self._drawn = 0.0

    def begun(self, state: StudyState, folder: Path) -> None:
        """Print the headline, and start the table below it."""
        self._state = state
        self.say(headline(state, folder))
        recent = estimate.earlier([entry.cell for entry in state.of("left")], folder)
        study = state.study
        pairing = estimate.Pairing(study.block, study.rounds, study.min_rounds)
        self._remaining = Remaining(estimate.known([*state.records, *recent]), study.budget, pairing)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self._count()
        self._draw()

    def callback(self, entry: CellState) -> Callback:
        """Return a callback that updates the line of a running cell."""
        return _Watcher(self.say, partial(self.note, entry))

    def changed(self, entry: CellState) -> None:
        """Update the rows and the estimate, and draw the table."""
        self._task = entry.cell.spec.task
        self._notes.pop(entry.cell.key, None)
        if entry.state == "running":
            self._remaining.begin(entry.cell, time.monotonic())
        else:
            self._remaining.end(entry.cell, entry.record, time.monotonic())
        self._count()
        self._draw()

    def note(self, entry: CellState, text: str) -> None:
        """Show a text beside the running cell."""
        self._notes[entry.cell.key] = text
        self.tick()

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(formatting.printed(text), markup=False, soft_wrap=True)

    def tick(self) -> None:
        """Draw the table again if the last time was a while ago."""
        if time.monotonic() - self._drawn >= REFRESH:
            self._draw()

    def close(self) -> None:
        """Remove the table: the whole table is printed at the end."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _count(self) -> None:
        """Update what changes only when a cell changes: the rows and the estimate."""
        assert self._state is not None
        failed = [Without(entry.cell, entry.reason) for entry in self._state.of("failed")]
        blocks = table.blocks(self._state.records, failed, paired=self._state.blocks)
        mine = [block for block in blocks if block.task.split(" ")[0] == self._task] or blocks[-1:]
        width = self._console.width - 1
        self._block = [line for block in mine for line in table_layout.draw(block, width, footnote=False)]
        self._remaining.plan(entry.cell for entry in self._state.of("left"))

    def _draw(self) -> None:
        live = self._live  # a callback of a run also draws, in its own thread
        if live is None:
            return
        self._drawn = time.monotonic()
        lines = [Text(formatting.line(line), no_wrap=True) for line in self.lines()]
        live.update(Group(*lines), refresh=True)

    def lines(self) -> list[str]:
        """The header, as many of the last rows as fit, the running cells and the counts."""
        assert self._state is not None
        width, height = self._console.width - 1, self._console.height
        running = [
            table_layout.cut(
                f" ▸ {cell_title(entry.cell)}  {self._notes.get(entry.cell.key, '')}".rstrip(), width
            )
            for entry in self._state.of("running")[:4]
        ]
        below = [*running, table_layout.cut(" " + self._counts(), width)]
        header, rows = self._block[:1], self._block[1:]
        room = max(1, height - len(below) - len(header) - 2)
        return [*header, *rows[-room:], *below]

    def _counts(self) -> str:
        assert self._state is not None
        state = self._state
        parts = [f"{len(state.of('finished'))} done"]
        parts += [f"{count} running"] if (count := len(state.of("running"))) else []
        parts += [f"{len(state.of('left'))} left"]
        parts += [f"{count} failed"] if (count := len(state.of("failed"))) else []
        if (seconds := self._remaining.seconds(time.monotonic())) is not None:
            parts.append(f"about {formatting.duration(max(1.0, seconds))} to go")
        return " · ".join(parts)


class _Watcher(Callback):
    """A callback that reports the progress of a run in a few words."""

    def __init__(self, say: Callable[[str], None], note: Callable[[str], None]) -> None:
        self._say, self._note = say, note
        self._start: Start | None = None
        self._noted = 0.0

    def on_start(self, start: Start) -> None:
        self._start = start
        self._note("starting")

    def on_step(self, step: StepRecord) -> None:
        """Report the progress, at most every REFRESH seconds."""
        start, now = self._start, time.monotonic()
        if start is None or now - self._noted < REFRESH:
            return
        self._noted = now
        rate = (step.samples - start.samples) / max(1e-9, step.seconds - start.seconds)
        unit = "img" if start.unit == "images" else start.unit
        self._note(
            f"{formatting.percent(share(start, step))}  loss {step.loss:.4f}  {formatting.rate(rate, unit)}"
        )

    def on_notice(self, text: str) -> None:
        self._say(text)


def headline(state: StudyState, folder: Path) -> str:
    """`46 cells · 12 finished before · results/default`."""
    cells = len(state.entries) - len(state.of("excluded"))
    parts = [formatting.plural(cells, "cell")]
    if before := sum(entry.earlier for entry in state.entries.values()):
        parts.append(f"{before} finished before")
    if excluded := len(state.of("excluded")):
        parts.append(f"{excluded} excluded")
    if budget := state.study.budget:
        parts.append(f"at most about {formatting.duration(budget)}")
    return " · ".join([*parts, str(folder)])


def outcome(entry: CellState) -> str:
    """The outcome of a cell, in one line."""
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
