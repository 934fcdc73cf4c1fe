"""The null launcher: the only worker is this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar, final

from manyhands.core.errors import UsageError
from manyhands.core.rank_info import NullChannel, RankInfo
from manyhands.launchers.base import DEFAULT_SUPERVISION, SupervisionOptions

T = TypeVar("T")


@final
class InlineLauncher:
    """Calls the function in this process."""

    leads = True

    def warm_up(self) -> None:
        """There is nothing to start."""

    def launch(
        self,
        function: Callable[..., Any],
        workers: int,
        *arguments: Any,
        supervision: SupervisionOptions = DEFAULT_SUPERVISION,
    ) -> list[Any]:
        """Run the only worker and return its result in a list; its messages are delivered at once.

        Its exceptions are raised unchanged, because no other process supervises this one.
        """
        if workers != 1:
            raise UsageError(f"the inline launcher runs 1 worker, not {workers}")
        return [
            function(RankInfo(channel=NullChannel(supervision.on_message, supervision.enough)), *arguments)
        ]

    def executor(self, workers: int) -> Executor:
        """An executor whose calls are done when `submit` returns."""
        return InlineExecutor()


@final
class InlineExecutor(Executor):
    """Every call is done when `submit` returns."""

    def __init__(self) -> None:
        self._closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run the call now."""
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 (any error belongs to the future)
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further calls; none is running."""
        self._closed = True
