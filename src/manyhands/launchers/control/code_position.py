"""Where the code of a worker stands: its stack, and whether it waits for other workers there."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_PACKAGE = Path(__file__).parents[2]
# A main thread in these files waits for other workers, unless a wrapper delays it or a fault is injected.
_WAITING_IN = (
    f"{_PACKAGE}/transports/",
    "/torch/distributed/",
    "/mpi4py/",
    str(Path(__file__).with_name("client.py")),
)
_EXCEPT = (f"{_PACKAGE}/transports/wrapper.py", f"{_PACKAGE}/engine/fault_injection/")
_LIBRARY = f"{Path(threading.__file__).parent}/"


class CodePosition(NamedTuple):
    """The position of a worker's main thread."""

    stack: str  # the innermost frame last
    waiting: bool  # whether the innermost frame waits for other workers


def position_of(thread: int | None) -> CodePosition:
    """Where a thread of this process is now."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return CodePosition("", False)
    return CodePosition("".join(traceback.format_stack(frame)), is_waiting(frame))


def is_waiting(innermost: FrameType) -> bool:
    """Whether a thread in this frame waits for other workers."""
    frame: FrameType | None = innermost
    # The standard library shows how a thread waits, not for what: its caller does.
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return False
    file = frame.f_code.co_filename
    return any(part in file for part in _WAITING_IN) and not file.startswith(_EXCEPT)


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARY) and "-packages" not in file
