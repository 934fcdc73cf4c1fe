"""Workers as processes of this machine, forked from a process that has torch imported already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, final

from manyhands.launchers import starting
from manyhands.launchers.base import PLAIN, Care
from manyhands.launchers.calls import check_workers
from manyhands.launchers.crew import LocalCrew, nursery
from manyhands.launchers.hub import Hub
from manyhands.launchers.pool import Pool

# By name: a launcher knows nothing of what is computed. The first optimiser that a process makes imports the
# second one, which takes as long as torch itself: once here instead of in every worker.
PRELOAD = ("manyhands.worker", "torch._dynamo")


@final
class Local:
    """A process a worker; they end when this process does, however it ends."""

    leads = True

    def __init__(self, hosts: Sequence[str] | None = None, preload: Sequence[str] = PRELOAD) -> None:
        """`hosts` lets tests pretend that the ranks are on several."""
        self._hosts = hosts
        self._preload = tuple(preload)

    def warm_up(self) -> None:
        """Begin to import what workers need, in a process of its own, without waiting for it."""
        nursery(self._preload)

    def launch(
        self, function: Callable[..., Any], workers: int, *arguments: Any, care: Care = PLAIN
    ) -> list[Any]:
        """Run the function once a worker and return what each of them returned, by rank."""

        def crew(hub: Hub, logs: Path | None) -> LocalCrew:
            return LocalCrew(hub, self._preload, self._hosts, logs)

        return starting.launch("local", crew, function, workers, arguments, care)

    def executor(self, workers: int) -> Executor:
        """A process a call at a time, used again for later ones; a call that crashes fails alone."""
        check_workers("local", workers)
        return Pool(workers, lambda hub: LocalCrew(hub, self._preload, self._hosts))
