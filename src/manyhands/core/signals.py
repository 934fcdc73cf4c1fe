"""Ctrl-C and SIGTERM as a request to stop: the trainer notices it after the current step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, the first signal is stored in `signal`. A second one interrupts at once.

    If requests are nested, the outer one gets the signal of the inner one on exit.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Only the main thread may set handlers. A trial in another thread is stopped by its executor.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._store) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
            if isinstance(outer := getattr(handler, "__self__", None), StopRequest):
                outer.signal = outer.signal or self.signal

    def _store(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
