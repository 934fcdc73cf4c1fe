"""The journal of a run: every step becomes a line of steps.jsonl."""

from __future__ import annotations

import contextlib
import os
from typing import TextIO

from manyhands.callbacks.base import Callback
from manyhands.core.atomic_files import cannot_write, open_regular
from manyhands.records.record import Start, StepRecord
from manyhands.records.run_folder import RunFolder


class Journal(Callback):
    """A callback that writes steps.jsonl.

    Lines are written in groups, which costs less per step. A crash loses the lines that wait, and the run
    repeats those steps from its last checkpoint: all lines are written before a checkpoint is.
    """

    max_steps = 64  # that wait
    max_seconds = 1.0  # of training that they wait

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.steps_file
        self._file: TextIO | None = None
        self._waiting: list[StepRecord] = []
        self._written = 0.0

    def on_start(self, start: Start) -> None:
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._file = os.fdopen(open_regular(self._path, flags), "a")
        except OSError as error:
            raise cannot_write(self._path, error) from error

    def on_step(self, step: StepRecord) -> None:
        self._waiting.append(step)
        if len(self._waiting) >= self.max_steps or step.seconds - self._written >= self.max_seconds:
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait, so that every other process sees them."""
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

    def close(self) -> None:
        """Close the file. A full disk is reported by `flush`, which is called before a run ends well."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
