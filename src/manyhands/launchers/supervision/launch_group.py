"""One call of a worker group whose processes this process starts; Ctrl-C is passed on to the workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from manyhands.core.signals import StopRequest
from manyhands.launchers.base import GroupProcesses, SupervisionOptions
from manyhands.launchers.control.remote_calls import check_workers, pack, unpack
from manyhands.launchers.control.server import ControlServer
from manyhands.launchers.supervision.worker_group import WorkerGroup


def launch_group(
    launcher: str,
    make_processes: Callable[[ControlServer, Path | None], AbstractContextManager[GroupProcesses]],
    function: Callable[..., Any],
    workers: int,
    arguments: tuple[Any, ...],
    supervision: SupervisionOptions,
) -> list[Any]:
    """Start the processes, run the function once per worker, and return the results by rank."""
    check_workers(launcher, workers)
    payload = pack(function, arguments)
    logs = supervision.logs.resolve() if supervision.logs else None
    with StopRequest() as stop, ControlServer() as server, make_processes(server, logs) as processes:
        processes.start(range(workers), f"of {workers}")
        group = WorkerGroup(server, processes, workers, supervision, lambda: stop.signal)
        values = group.run(payload)
        group.dismiss()
    return [unpack(rank, value) for rank, value in enumerate(values)]
