"""A callback in a worker that forwards every event to the parent, whose callbacks a person sees."""

from __future__ import annotations

from manyhands.callbacks.base import Callback
from manyhands.core.rank_info import ControlChannel
from manyhands.records.record import RunRecord, Start, StepRecord


class Relay(Callback):
    """An observer that tells the parent, whose observers are the ones that a person sees."""

    def __init__(self, line: ControlChannel) -> None:
        self._tell = line.tell

    def started(self, start: Start) -> None:
        """Passed on."""
        self._tell(("started", start))

    def stepped(self, step: StepRecord) -> None:
        """Passed on."""
        self._tell(("stepped", step))

    def ended(self, record: RunRecord) -> None:
        """Passed on."""
        self._tell(("ended", record))

    def notice(self, text: str) -> None:
        """Passed on."""
        self._tell(("notice", text))

    def close(self) -> None:
        """The parent closes its own."""
