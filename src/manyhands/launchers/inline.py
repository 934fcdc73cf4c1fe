"""The null launcher: the one worker is this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar, final

from manyhands.core.errors import UsageError
from manyhands.core.rank_info import NullChannel, RankInfo
from manyhands.launchers.base import PLAIN, Supervision

T = TypeVar("T")


@final
class InlineLauncher:
    """Calls the function, here and now."""

    leads = True

    def warm_up(self) -> None:
        """Nothing takes long."""

    def launch(
        self, function: Callable[..., Any], workers: int, *arguments: Any, supervision: Supervision = PLAIN
    ) -> list[Any]:
        """Run the one worker and return its result in a list; what it tells is heard at once.

        What it raises is raised as it is: nobody is there to look after this process but itself.
        """
        if workers != 1:
            raise UsageError(f"the inline launcher runs 1 worker, not {workers}")
        return [function(RankInfo(channel=NullChannel(supervision.hear)), *arguments)]

    def executor(self, workers: int) -> Executor:
        """An executor whose calls are done when `submit` returns."""
        return InlineExecutor()


@final
class InlineExecutor(Executor):
    """Every call is done when `submit` returns."""

    def __init__(self) -> None:
        self._closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call it."""
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
        """Nothing is running."""
        self._closed = True
