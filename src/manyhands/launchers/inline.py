"""The null launcher: the one worker is this process."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar, final

from manyhands.errors import UsageError
from manyhands.launchers.base import Place

T = TypeVar("T")


@final
class Inline:
    """Calls the function, here and now."""

    def launch(self, function: Callable[..., Any], workers: int, *arguments: Any) -> list[Any]:
        """Run the one worker and return its result in a list."""
        if workers != 1:
            raise UsageError(f"the inline launcher runs 1 worker, not {workers}")
        return [function(Place(0, 1, socket.gethostname()), *arguments)]

    def executor(self, workers: int) -> Executor:
        """An executor whose calls are done when `submit` returns."""
        return _InlineExecutor()


class _InlineExecutor(Executor):
    def __init__(self) -> None:
        self._closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 (whatever it is, it belongs to whoever asks for the result)
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
