"""A run that is measured in blocks: after each step a worker comes to a gate, and sleeps if it is closed."""

from __future__ import annotations

from typing import Protocol, final

from manyhands.core.pause_gate import Progress, WorkerGate
from manyhands.engine.job import Job
from manyhands.engine.timing.clock import Clock

SIGN_OF_LIFE = 0.5  # seconds between two changes of the clock: the watchdog takes them for progress


class Pauses(Protocol):
    """Where the training loops let a worker pause."""

    @property
    def over(self) -> bool:
        """Whether the run is to end."""

    def stepped(self, step: int, samples: int, shared: bool = True) -> None:
        """A worker has made this many steps, with this many samples; return when it may go on.

        `shared` says whether all workers exchanged something in the last step.
        """

    @property
    def seconds_missed(self) -> float:
        """For how long others slept while this rank, which makes no steps, had nothing to do."""


@final
class NoPauses:
    """The null member: the run never pauses."""

    over = False
    seconds_missed = 0.0

    def stepped(self, step: int, samples: int, shared: bool = True) -> None:
        """Go on at once."""


@final
class BlockPauses:
    """Pauses at the gate of a measurement in blocks."""

    def __init__(self, gate: WorkerGate, clock: Clock, together: bool) -> None:
        self._gate, self._clock, self._together = gate, clock, together
        self._steps = False

    @property
    def over(self) -> bool:
        return self._gate.over

    def stepped(self, step: int, samples: int, shared: bool = True) -> None:
        self._steps = True
        self._gate.mark(Progress(step, samples, self._clock.training_seconds))
        if not self._gate.is_closed(step, self._together, shared):
            return
        with self._clock.phase("paused"):
            while not self._gate.sleep(SIGN_OF_LIFE):
                self._clock.switch("paused")

    @property
    def seconds_missed(self) -> float:
        return 0.0 if self._steps else self._gate.seconds_closed


def pauses_of(job: Job, rank: int, clock: Clock, together: bool) -> Pauses:
    """The pauses of a job: none, unless it has a gate."""
    if job.gate is None:
        return NoPauses()
    return BlockPauses(WorkerGate(job.gate, rank, job.spec.ranks), clock, together)
