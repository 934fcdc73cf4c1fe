"""Measure speeds in pairs: warm runs take turns, and every block has blocks of the baseline on both sides.

    round 0:  B  c1  B  c2  B  c3  B          B: the baseline, one worker with one thread
    round 1:  B  c2  B  c3  B  c1  B          all others sleep meanwhile

After some of the rounds (analysis/pairs.py) the cells that clearly lose are ended. The blocks that they would
have had go to those that are not told apart yet, until the time is up.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from manyhands.analysis import pairs
from manyhands.callbacks.base import Callback
from manyhands.core import environment, formatting
from manyhands.core.errors import InterruptedRunError, ManyhandsError
from manyhands.core.signals import StopRequest
from manyhands.records.record import RunRecord
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import Block
from manyhands.study.attempt import in_own_process
from manyhands.study.study_state import CellState
from manyhands.study.warm_run import BlockSpeed, EndedError, WarmRun

CANCEL = 5.0  # seconds for runs that are no longer wanted to end by themselves
ROOM = 1.5  # times the memory of the largest run so far must be left for one more
STEPS = 5  # of a block that must count, however slow they are
WARM_UP = 6  # steps before the first block


class Rounds(NamedTuple):
    """How many rounds every cell is measured in at least, and the last ones at most."""

    least: int
    most: int


class PairedTracker(Protocol):
    """The part of `Execution` that journals and shows the progress of paired cells."""

    @property
    def path(self) -> Path: ...

    def begin(self, entry: CellState) -> None: ...

    def start(self, entry: CellState) -> str: ...

    def block(self, entry: CellState, number: int, position: int, speed: BlockSpeed) -> Block: ...

    def finish(self, entry: CellState, name: str, record: RunRecord) -> None: ...

    def fail(self, entry: CellState, name: str, error: Exception) -> None: ...

    def note(self, entry: CellState, text: str) -> None: ...


def comparisons(entries: Sequence[CellState]) -> list[list[CellState]]:
    """The cells that are compared with each other: those of one task."""
    found: dict[str, list[CellState]] = {}
    for entry in entries:
        spec = entry.cell.spec
        found.setdefault(f"{spec.task} {sorted(spec.options.items())}", []).append(entry)
    return list(found.values())


def baseline_of(entries: Sequence[CellState]) -> CellState:
    """One worker with one thread; a study file gets such a cell if it has none."""
    for entry in entries:
        if _threads(entry.cell.spec) == 1:
            return entry
    return min(entries, key=lambda entry: _threads(entry.cell.spec))


def _threads(spec: RunSpec) -> int:
    return spec.ranks * (spec.threads or max(1, environment.cores() // spec.ranks))


class PairedMeasurement:
    """The measurement of the cells of one task."""

    def __init__(
        self,
        entries: Sequence[CellState],
        before: Sequence[Block],
        seconds: float,
        tracker: PairedTracker,
    ) -> None:
        """`before` are the blocks of earlier sessions; `seconds` is the length of a block."""
        first = baseline_of(entries)
        self._baseline = first.cell.key
        self._entries = {entry.cell.key: entry for entry in [first, *entries]}
        self._blocks = [block for block in before if block.cell in self._entries]
        self._seconds, self._tracker = seconds, tracker
        self._warm: dict[str, WarmRun] = {}
        self._names: dict[str, str] = {}
        self._stop = StopRequest()

    def run(self, rounds: Rounds, until: float, advantage: Mapping[str, pairs.Advantage]) -> None:
        """Measure until the cells are told apart, for at most so many rounds, and until this time.

        Every session measures a few rounds, however late it is: fewer would tell nothing.
        """
        least = max(rounds.least, pairs.LOOKS[0])
        first = 1 + max((block.round for block in self._blocks), default=-1)
        with self._stop, self._closing():
            self._start()
            took = 0.0
            for number in range(first, max(rounds.most, first + 1)):
                if self._baseline not in self._warm or len(self._warm) < 2:
                    break  # nothing is left to compare, or nothing to compare with
                began = time.monotonic()
                if number >= least and began + took > until:
                    break
                self._round(number)
                took = time.monotonic() - began
                decision = pairs.decide(self._blocks, self._baseline, self._entries, advantage, least)
                self._end(decision.eliminated - {self._baseline})
                if decision.settled:
                    break
            self._end({*self._warm})

    # ------------------------------------------------------------------ rounds
    def _start(self) -> None:
        """Start all runs, one after the other, and let them sleep after their first steps."""
        tracker, most, before = self._tracker, 0, environment.available_memory()
        for key, entry in self._entries.items():
            tracker.begin(entry)
            name = self._names[key] = tracker.start(entry)
            left = environment.available_memory()
            most, before = max(most, before - left), left
            if left < ROOM * most:
                free = f"{formatting.size(left)} of memory are free"
                reason = f"{free}, too little to keep one more run alive: compare fewer cells at a time"
                tracker.fail(entry, name, ManyhandsError(reason))
                continue
            folder = tracker.path / name
            shutil.rmtree(folder, ignore_errors=True)  # of a session that was stopped
            gate = folder.with_name(f"{name}.gate")  # a label may have a dot
            tracker.note(entry, "starting")
            spec = in_own_process(entry.cell.spec)
            self._warm[key] = WarmRun(spec, folder, gate, Callback(), self._check)
            with self._failing(key):
                self._warm[key].warm_up(self._seconds / 2, WARM_UP)
            tracker.note(entry, "waiting for its turn")

    def _round(self, number: int) -> None:
        """One block of every cell that is left, each between two of the baseline."""
        others = [key for key in self._warm if key != self._baseline]
        turn = number % max(1, len(others))
        position = 0
        self._block(self._baseline, number, position)
        for key in others[turn:] + others[:turn]:
            if self._block(key, number, position + 1):
                position += 2
                if not self._block(self._baseline, number, position):
                    return

    def _block(self, key: str, number: int, position: int) -> bool:
        """Measure one block; whether it was measured."""
        entry, before = self._entries[key], len(self._blocks)
        with self._failing(key):
            self._tracker.note(entry, f"round {number + 1}{self._so_far(key)}")
            speed = self._warm[key].block(self._seconds, STEPS)
            self._blocks.append(self._tracker.block(entry, number, position, speed))
        return len(self._blocks) > before

    def _so_far(self, key: str) -> str:
        """`, 1.63x (1.55 to 1.71)`: the speed-up so far."""
        lane = pairs.lane_of(self._blocks, key)
        found = pairs.compared(lane, key, self._baseline) if lane and key != self._baseline else None
        if found is None:
            return ""
        return f", {found.ratio.median:.2f}x ({found.ratio.low:.2f} to {found.ratio.high:.2f})"

    # ------------------------------------------------------------------ ends
    @contextlib.contextmanager
    def _failing(self, key: str) -> Iterator[None]:
        """A run that fails or diverges leaves the comparison; the others continue."""
        try:
            yield
        except InterruptedRunError:
            raise
        except EndedError:  # it diverged: that is a result
            self._end({key})
        except Exception as error:  # noqa: BLE001 (a task's own code may raise anything)
            del self._warm[key]
            self._tracker.fail(self._entries[key], self._names[key], error)

    def _end(self, keys: set[str]) -> None:
        """End these runs, whose measurement is complete, and keep their records."""
        for key in sorted(keys & self._warm.keys()):
            entry, name = self._entries[key], self._names[key]
            try:
                record = self._warm.pop(key).end()
            except Exception as error:  # noqa: BLE001 (as above)
                self._tracker.fail(entry, name, error)
            else:
                self._tracker.finish(entry, name, record)

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """However this ends, no run is left behind."""
        try:
            yield
        finally:
            for run in self._warm.values():
                run.ask_to_end()
            until = time.monotonic() + CANCEL
            for run in self._warm.values():
                run.wait(max(0.0, until - time.monotonic()))

    def _check(self) -> None:
        """Raise an error if a signal asks to stop; called while waiting."""
        if self._stop.signal is not None:
            raise InterruptedRunError("interrupted while measuring", self._stop.signal)
