"""The interface of a callback: override the events that you want to hear of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from manyhands.records.record import RunRecord, Start, StepRecord

Answer = Literal["stop"] | None
"""What `on_step` and `on_evaluation` may return: "stop" ends the run after the current step."""


class Callback:
    """Hears of a run's events in order; each method does nothing here, so this is also the null member.

    It is called in a thread of its own in the process that started the run, whatever the workers do, and
    cannot end the run by an error: one that raises is switched off. `on_step` and `on_evaluation` may return
    "stop": the run then ends within a few steps as if its budget were spent.
    """

    def on_waiting(self, text: str) -> None:
        """Called with what takes a while before the first step: `starting 2 workers ...`."""

    def on_start(self, start: Start) -> None:
        """Called before the first step, and again where workers were restarted."""

    def on_step(self, step: StepRecord) -> Answer:
        """Called after each step."""
        return None

    def on_evaluation(self, step: StepRecord) -> Answer:
        """Called after each evaluation, with the step before it: `step.metric` and `step.test_loss`."""
        return None

    def on_end(self, record: RunRecord) -> None:
        """Called once, with the run's record."""

    def on_notice(self, text: str) -> None:
        """Called with a sentence for a person."""

    def close(self) -> None:
        """Called once, however the run ended."""


class StepFunction(Callback):
    """A function that is called with each step, as a callback."""

    def __init__(self, function: Callable[[StepRecord], Answer]) -> None:
        self._function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def on_step(self, step: StepRecord) -> Answer:
        return self._function(step)
