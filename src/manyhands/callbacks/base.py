"""The interface of a callback: override the events that you want to hear of."""

from __future__ import annotations

from manyhands.records.record import RunRecord, Start, StepRecord


class Callback:
    """Hears of a run's events in order; each method does nothing here, so this is also the null member."""

    def on_waiting(self, text: str) -> None:
        """Called with what takes a while before the first step: `starting 2 workers ...`."""

    def on_start(self, start: Start) -> None:
        """Called before the first step, and again where workers were restarted."""

    def on_step(self, step: StepRecord) -> None:
        """Called after each step."""

    def on_end(self, record: RunRecord) -> None:
        """Called once, with the run's record."""

    def on_notice(self, text: str) -> None:
        """Called with a sentence for a person."""

    def close(self) -> None:
        """Called once, however the run ended."""
