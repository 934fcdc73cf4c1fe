"""A callback in a worker that forwards every event to the parent process, where the other callbacks are."""

from __future__ import annotations

from manyhands.callbacks.base import Callback
from manyhands.core.rank_info import ControlChannel
from manyhands.records.record import RunRecord, Start, StepRecord


class Relay(Callback):
    """Sends each event as a pair: the name of the callback's method, and its argument."""

    def __init__(self, channel: ControlChannel) -> None:
        self._send = channel.tell

    def on_start(self, start: Start) -> None:
        self._send(("on_start", start))

    def on_step(self, step: StepRecord) -> None:
        self._send(("on_step", step))

    def on_end(self, record: RunRecord) -> None:
        self._send(("on_end", record))

    def on_notice(self, text: str) -> None:
        self._send(("on_notice", text))
