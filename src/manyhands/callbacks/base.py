"""The interface of a callback: whoever follows a run overrides what it wants to hear (law 12)."""

from __future__ import annotations

from manyhands.records.record import RunRecord, Start, StepRecord


class Callback:
    """Hears of a run's events in order; each method does nothing here, so this is also the null member."""

    def started(self, start: Start) -> None:
        """Called once, before the first step."""

    def stepped(self, step: StepRecord) -> None:
        """Called after each step."""

    def ended(self, record: RunRecord) -> None:
        """Called once, with the run's record."""

    def notice(self, text: str) -> None:
        """Called with a sentence for a person."""

    def close(self) -> None:
        """Called once, however the run ended."""
