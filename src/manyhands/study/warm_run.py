"""A run whose workers stay warm: it runs for a block, sleeps while others are measured, and runs again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, final

from manyhands.callbacks.base import Callback
from manyhands.core.errors import ManyhandsError
from manyhands.core.pause_gate import PauseGate
from manyhands.records.record import RunRecord
from manyhands.records.spec import RunSpec
from manyhands.study.attempt import attempt

POLL = 0.002  # seconds between two looks at the workers
NAP = 0.2  # seconds of sleep at a time while a block runs: looking would take time from it
SLOWEST = 60.0  # seconds that a block may last longer than asked for, until it has enough steps
FALLING_ASLEEP = 1.0  # seconds that workers get when the leading one sleeps already


class BlockSpeed(NamedTuple):
    """The speed of a block."""

    samples_per_second: float
    steps: int
    seconds: float


class EndedError(ManyhandsError):
    """The run has ended by itself: it failed, diverged or was stopped."""


@final
class WarmRun:
    """A run in a thread of its own; its gate lets it run in blocks."""

    def __init__(
        self, spec: RunSpec, folder: Path, gate: Path, callback: Callback, check: Callable[[], None]
    ) -> None:
        """Start it; `check` is called while this waits for the workers, and may raise an error."""
        self._spec, self._check = spec, check
        self._gate = PauseGate(gate, spec.ranks)
        self._record: RunRecord | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(folder, callback), name=f"warm run {folder.name}", daemon=True
        )
        self._gate.open()
        self._thread.start()

    def _run(self, folder: Path, callback: Callback) -> None:
        try:
            self._record = attempt(self._spec, folder, callback, self._gate.path)
        except BaseException as error:  # noqa: BLE001 (raised again where the result is asked for)
            self._error = error

    def warm_up(self, seconds: float, steps: int) -> None:
        """Run until the workers have made their first steps, and sleep."""
        self._wait_for_steps(seconds, steps, patience=None)
        self._sleep()

    def block(self, seconds: float, steps: int) -> BlockSpeed:
        """Run for so long, and at least so many steps, and sleep; return the speed."""
        self._gate.open()
        self._wait_for_steps(seconds, steps, patience=SLOWEST)
        self._sleep()
        measured = [self._gate.progress(rank) for rank in self._measured_ranks]
        counted = [each for each in measured if each.steps and each.seconds > 0]
        if not counted:
            raise EndedError("no worker finished two steps in a block")
        rate = sum(each.samples / each.seconds for each in counted)
        return BlockSpeed(rate, sum(each.steps for each in counted), max(each.seconds for each in counted))

    def ask_to_end(self) -> None:
        """Let the run end after its next step."""
        self._gate.end()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it has ended, for at most so long; one that is still starting ends with this process."""
        self._thread.join(seconds)
        self._gate.path.unlink(missing_ok=True)

    def end(self) -> RunRecord:
        """End the run and return its record; raise what it raised."""
        self.ask_to_end()
        self.wait()
        if self._error is not None:
            raise self._error
        assert self._record is not None
        return self._record

    @property
    def _measured_ranks(self) -> range:
        """Workers that step together have one speed, which rank 0 knows; the others have one each."""
        spec = self._spec
        return range(spec.servers, spec.ranks) if spec.traits.asynchronous else range(1)

    def _wait_for_steps(self, seconds: float, steps: int, patience: float | None) -> None:
        began = time.monotonic()
        while True:
            self._raise_if_ended()
            made = min(self._gate.progress(rank).steps for rank in self._measured_ranks)
            waited = time.monotonic() - began
            if made >= steps and waited >= seconds:
                return
            if patience is not None and waited > seconds + patience:
                return
            time.sleep(max(POLL, min(NAP, seconds - waited)))

    def _sleep(self) -> None:
        """Close the gate and wait until all workers sleep."""
        self._gate.close()
        until = None
        while True:
            self._raise_if_ended()
            asleep = [self._gate.is_asleep(rank) for rank in range(self._spec.servers, self._spec.ranks)]
            if all(asleep) or (until is not None and time.monotonic() > until):
                return
            if until is None and all(self._gate.is_asleep(rank) for rank in self._measured_ranks):
                # a worker may wait for one that sleeps; then it sleeps, too
                until = time.monotonic() + FALLING_ASLEEP
            time.sleep(POLL)

    def _raise_if_ended(self) -> None:
        self._check()
        if self._thread.is_alive():
            return
        if self._error is not None:
            raise self._error
        assert self._record is not None
        raise EndedError(f"the run has ended: {self._record.message or self._record.status}")
