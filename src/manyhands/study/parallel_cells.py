"""Cells whose seconds do not count, several at a time: a process and a share of the cores each."""

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

TICK = 0.5  # seconds


class Books(Protocol):
    """Where it is written down what becomes of cells."""

    @property
    def path(self) -> Path: ...

    def begin(self, entry: CellState) -> None: ...

    def start(self, entry: CellState) -> str: ...

    def end(self, entry: CellState, name: str, result: Callable[[], RunRecord]) -> None: ...

    def is_over(self) -> bool: ...

    def tick(self) -> None: ...


def beside(entries: list[CellState], jobs: int, books: Books) -> None:
    """Run them all, `jobs` at a time; Ctrl-C ends all of them at once."""
    launcher: Launcher = registry.member("launcher", LAUNCHERS, LOCAL)()
    threads = max(1, environment.cores() // jobs)
    waiting = list(reversed(entries))
    running: dict[Future[RunRecord], tuple[CellState, str]] = {}
    with launcher.executor(jobs) as pool:
        while running or (waiting and not books.is_over()):
            while waiting and len(running) < jobs and not books.is_over():
                entry = waiting.pop()
                books.begin(entry)
                spec, name = entry.cell.spec, books.start(entry)
                spec = spec if spec.threads else spec.replace(threads=threads)
                running[pool.submit(attempt_quietly, spec, books.path / name)] = entry, name
            done, _ = wait(running, timeout=TICK, return_when=FIRST_COMPLETED)
            for future in done:
                books.end(*running.pop(future), future.result)
            books.tick()
