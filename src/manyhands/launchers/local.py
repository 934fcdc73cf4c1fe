"""Workers as processes of this machine, forked from a process that has torch imported already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, final

from manyhands.launchers.base import DEFAULT_SUPERVISION, SupervisionOptions
from manyhands.launchers.control.remote_calls import check_workers
from manyhands.launchers.control.server import ControlServer
from manyhands.launchers.processes.executor import WorkerExecutor
from manyhands.launchers.processes.local_processes import LocalProcesses, fork_server
from manyhands.launchers.supervision.launch_group import launch_group

# By name: a launcher knows nothing of what is computed. The first optimizer that a process makes imports the
# second one, which takes as long as torch itself: once here instead of in every worker.
PRELOAD = ("manyhands.engine.session", "torch._dynamo")


@final
class LocalLauncher:
    """One process per worker; they end when this process does, however it ends."""

    leads = True

    def __init__(self, hosts: Sequence[str] | None = None, preload: Sequence[str] = PRELOAD) -> None:
        """With `hosts`, tests pretend that the ranks are on several hosts."""
        self._hosts = hosts
        self._preload = tuple(preload)

    def warm_up(self) -> None:
        """Start the process that imports what workers need, without waiting for it."""
        fork_server(self._preload)

    def launch(
        self,
        function: Callable[..., Any],
        workers: int,
        *arguments: Any,
        supervision: SupervisionOptions = DEFAULT_SUPERVISION,
    ) -> list[Any]:
        """Run the function once per worker and return the results by rank."""

        def processes(server: ControlServer, logs: Path | None) -> LocalProcesses:
            return LocalProcesses(server, self._preload, self._hosts, logs)

        return launch_group("local", processes, function, workers, arguments, supervision)

    def executor(self, workers: int) -> Executor:
        """An executor whose processes are reused by later calls; a crash fails one call only."""
        check_workers("local", workers)
        return WorkerExecutor(workers, lambda server: LocalProcesses(server, self._preload, self._hosts))
