"""What a launcher knows about one worker, and how a process can end."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from manyhands.core.rank_info import RankStatus
from manyhands.launchers.control.code_position import CodePosition
from manyhands.launchers.control.remote_calls import Failure


class ProcessExit(NamedTuple):
    """How a process ended; `lost`: its connection closed, and nothing else is known."""

    kind: Literal["signal", "exit", "lost"]
    number: int = 0


@dataclass
class WorkerState:
    """All that is known about one worker."""

    rank: int
    host: str = ""
    pid: int = 0
    status: RankStatus | None = None  # None: it has not sent one
    stalled_for: float = 0.0  # seconds without progress
    silent_for: float = 0.0  # seconds since its last message
    position: CodePosition | None = None  # None: it did not respond
    stopped: bool = False  # by SIGSTOP or a debugger
    connected: bool = True  # whether it ever said hello
    returned: bool = False
    failure: Failure | None = None
    exit: ProcessExit | None = None
    failed_at: float | None = None  # when its failure or exit was noticed
    log: Path | None = None
    has_output: bool = False  # whether its log holds output of its own
    is_replacement: bool = False
    lost: bool = False  # and the others continued


def exit_of(wait_status: int) -> ProcessExit:
    """The exit that a wait status of the system means."""
    code = os.waitstatus_to_exitcode(wait_status)
    return ProcessExit("signal", -code) if code < 0 else ProcessExit("exit", code)
