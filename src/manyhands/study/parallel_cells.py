"""Run cells that are not timed in parallel, each in its own process with a share of the cores."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Protocol

from manyhands.core import environment, registry
from manyhands.core.registry.launchers import LAUNCHERS, LOCAL
from manyhands.launchers.base import Launcher
from manyhands.records.record import RunRecord
from manyhands.study.attempt import attempt_quietly
from manyhands.study.study_state import CellState

TICK = 0.5  # seconds between two calls of `tick`


class CellTracker(Protocol):
    """The part of `Execution` that journals and shows the progress of cells."""

    @property
    def path(self) -> Path: ...

    def begin(self, entry: CellState) -> None: ...

    def start(self, entry: CellState) -> str: ...

    def end(self, entry: CellState, name: str, result: Callable[[], RunRecord]) -> None: ...

    def is_over(self) -> bool: ...

    def tick(self) -> None: ...


def run_parallel(entries: list[CellState], jobs: int, tracker: CellTracker) -> None:
    """Run all cells, `jobs` at a time; Ctrl-C ends all of them at once."""
    launcher: Launcher = registry.member("launcher", LAUNCHERS, LOCAL)()
    threads = max(1, environment.cores() // jobs)
    waiting = list(reversed(entries))
    running: dict[Future[RunRecord], tuple[CellState, str]] = {}
    with launcher.executor(jobs) as pool:
        while running or (waiting and not tracker.is_over()):
            while waiting and len(running) < jobs and not tracker.is_over():
                entry = waiting.pop()
                tracker.begin(entry)
                spec, name = entry.cell.spec, tracker.start(entry)
                spec = spec if spec.threads else spec.replace(threads=threads)
                running[pool.submit(attempt_quietly, spec, tracker.path / name)] = entry, name
            done, _ = wait(running, timeout=TICK, return_when=FIRST_COMPLETED)
            for future in done:
                tracker.end(*running.pop(future), future.result)
            tracker.tick()
