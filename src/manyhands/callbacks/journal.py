"""The journal of a run: every step becomes a line of steps.jsonl."""

from __future__ import annotations

import contextlib
import os
from typing import TextIO

from manyhands.callbacks.base import Callback
from manyhands.core.atomic_files import cannot_write, open_regular
from manyhands.records.record import RunRecord, Start, StepRecord
from manyhands.records.run_folder import RunFolder


class Journal(Callback):
    """An observer that writes steps.jsonl.

    Lines are written some at a time, which costs a step less than each at once; what a crash takes with
    it is done again from the last checkpoint, before which everything is written.
    """

    most = 64  # steps that wait
    longest = 1.0  # seconds they wait

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.steps_file
        self._file: TextIO | None = None
        self._waiting: list[StepRecord] = []
        self._written = 0.0

    def started(self, start: Start) -> None:
        """Open for appending."""
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._file = os.fdopen(open_regular(self._path, flags), "a")
        except OSError as error:
            raise cannot_write(self._path, error) from error

    def stepped(self, step: StepRecord) -> None:
        """Take a step."""
        self._waiting.append(step)
        if len(self._waiting) >= self.most or step.seconds - self._written >= self.longest:
            self.flush()

    def flush(self) -> None:
        """Write what waits, to where every other process sees it."""
        if self._file is None or not self._waiting:
            return
        self._written = self._waiting[-1].seconds
        lines = "".join(f"{step.to_json()}\n" for step in self._waiting)
        self._waiting.clear()
        try:
            self._file.write(lines)
            self._file.flush()
        except OSError as error:
            raise cannot_write(self._path, error) from error

    def ended(self, record: RunRecord) -> None:
        """Nothing: the result is written by the run."""

    def notice(self, text: str) -> None:
        """Nothing: notices are for people."""

    def close(self) -> None:
        """Close the file; that the disk is full was said by `flush`, which comes before every good end."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
