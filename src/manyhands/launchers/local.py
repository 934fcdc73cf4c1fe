"""Workers as processes of this machine, forked from a process that has torch imported already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, final

from manyhands.launchers.base import PLAIN, Supervision
from manyhands.launchers.control.remote_calls import check_workers
from manyhands.launchers.control.server import ControlServer
from manyhands.launchers.processes.executor import WorkerExecutor
from manyhands.launchers.processes.local_processes import LocalProcesses, fork_server
from manyhands.launchers.supervision import launch

# By name: a launcher knows nothing of what is computed. The first optimizer that a process makes imports the
# second one, which takes as long as torch itself: once here instead of in every worker.
PRELOAD = ("manyhands.engine.session", "torch._dynamo")


@final
class LocalLauncher:
    """A process a worker; they end when this process does, however it ends."""

    leads = True

    def __init__(self, hosts: Sequence[str] | None = None, preload: Sequence[str] = PRELOAD) -> None:
        """`hosts` lets tests pretend that the ranks are on several."""
        self._hosts = hosts
        self._preload = tuple(preload)

    def warm_up(self) -> None:
        """Begin to import what workers need, in a process of its own, without waiting for it."""
        fork_server(self._preload)

    def launch(
        self, function: Callable[..., Any], workers: int, *arguments: Any, supervision: Supervision = PLAIN
    ) -> list[Any]:
        """Run the function once a worker and return what each of them returned, by rank."""

        def crew(hub: ControlServer, logs: Path | None) -> LocalProcesses:
            return LocalProcesses(hub, self._preload, self._hosts, logs)

        return launch.launch("local", crew, function, workers, arguments, supervision)

    def executor(self, workers: int) -> Executor:
        """A process a call at a time, used again for later ones; a call that crashes fails alone."""
        check_workers("local", workers)
        return WorkerExecutor(workers, lambda hub: LocalProcesses(hub, self._preload, self._hosts))
