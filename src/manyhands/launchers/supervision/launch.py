"""One call of a gang whose processes this process starts: begun, tended, taken back; Ctrl-C is passed on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from manyhands.core.signals import StopRequest
from manyhands.launchers.base import Supervision, WorkerProcesses
from manyhands.launchers.control.remote_calls import check_workers, pack, unpack
from manyhands.launchers.control.server import ControlServer
from manyhands.launchers.supervision.worker_group import WorkerGroup


def launch(
    name: str,
    crew: Callable[[ControlServer, Path | None], AbstractContextManager[WorkerProcesses]],
    function: Callable[..., Any],
    workers: int,
    arguments: tuple[Any, ...],
    supervision: Supervision,
) -> list[Any]:
    """Run the function once a worker of a crew, and return what each of them returned, by rank."""
    check_workers(name, workers)
    payload = pack(function, arguments)
    logs = supervision.logs.resolve() if supervision.logs else None
    with StopRequest() as stop, ControlServer() as hub, crew(hub, logs) as started:
        started.start(range(workers), f"of {workers}")
        gang = WorkerGroup(hub, started, workers, supervision, lambda: stop.signal)
        values = gang.run(payload)
        gang.dismiss()
    return [unpack(rank, value) for rank, value in enumerate(values)]
