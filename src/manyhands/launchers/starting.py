"""One call of a gang whose processes this process starts: begun, tended, taken back; Ctrl-C is passed on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from manyhands.launchers.base import Care, Crew
from manyhands.launchers.calls import check_workers, pack, unpack
from manyhands.launchers.gang import Gang
from manyhands.launchers.hub import Hub
from manyhands.stopping import Stop


def launch(
    name: str,
    crew: Callable[[Hub, Path | None], AbstractContextManager[Crew]],
    function: Callable[..., Any],
    workers: int,
    arguments: tuple[Any, ...],
    care: Care,
) -> list[Any]:
    """Run the function once a worker of a crew, and return what each of them returned, by rank."""
    check_workers(name, workers)
    payload = pack(function, arguments)
    logs = care.logs.resolve() if care.logs else None
    with Stop() as stop, Hub() as hub, crew(hub, logs) as started:
        started.start(range(workers), f"of {workers}")
        gang = Gang(hub, started, workers, care, lambda: stop.signal)
        values = gang.run(payload)
        gang.dismiss()
    return [unpack(rank, value) for rank, value in enumerate(values)]
