"""The interface of a launcher: run one function on a group of workers, or many functions in an executor.

`Launcher` is what the rest of the package uses. `WorkerProcesses` is what a launcher offers to the code that
supervises its processes: the worker group (`GroupProcesses`) or the executor (`ExecutorProcesses`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from manyhands.core.rank_info import ignore
from manyhands.launchers.worker_state import ProcessExit, WorkerState


@dataclass(frozen=True)
class SupervisionOptions:
    """How a worker group is supervised while it runs."""

    on_message: Callable[[Any], None] = ignore  # gets what workers `tell`, in their order
    on_notice: Callable[[str], None] = ignore  # gets sentences for a person: a worker was lost, ...
    logs: Path | None = None  # a folder for the output of the workers, one file per rank; None: discarded
    timeout: float | None = None  # seconds without progress that count as a hang; None: adapts to the steps
    expendable: frozenset[int] = frozenset()  # ranks that may be lost after they have started ...
    min_remaining: int = 1  # ... while at least this many of them are left
    max_replacements: int = 0  # how many lost workers are replaced, if the launcher can
    enough: Callable[[], bool] = lambda: False  # whether the work may end: `channel.stop` becomes ENOUGH
    on_lost: Callable[[int, str], None] = ignore  # gets the rank of each lost worker, and a sentence about it


DEFAULT_SUPERVISION = SupervisionOptions()


class Launcher(Protocol):
    """Starts processes and knows nothing of what they compute.

    The function gets its RankInfo first, then the arguments. All of them can be pickled, so that the same
    call works in a thread, a process, an MPI rank, a Ray actor or a Spark task.

    A worker that raises a ManyhandsError ends the group with that error. A worker that raises anything else,
    dies or hangs ends it with WorkerFailedError (law 5), unless its rank is expendable: then the others
    continue, and its result is None. SIGINT and SIGTERM reach the workers through `channel.stop`.
    """

    leads: bool  # whether this process decides and writes; false at ranks 1, 2, ... that torchrun started

    def warm_up(self) -> None:
        """Start what will be needed and takes long, if anything; returns at once."""

    def launch(
        self,
        function: Callable[..., Any],
        workers: int,
        *arguments: Any,
        supervision: SupervisionOptions = DEFAULT_SUPERVISION,
    ) -> list[Any]:
        """Run the function once per worker and return the results by rank.

        In a process that does not lead, the function and arguments of the leader are run instead.
        """

    def executor(self, workers: int) -> Executor:
        """An executor for independent calls, `workers` at a time."""


class WorkerProcesses(Protocol):
    """The processes that a launcher started, or that another program started for it."""

    reports_exits: bool  # whether it knows how each process ended; otherwise only that a connection closed

    def start(self, ranks: Sequence[int], title: str) -> None:
        """Start these ranks; each connects to the control server and says hello."""

    def exits(self) -> dict[int, ProcessExit]:
        """How processes ended, by rank; WorkerFailedError if the program that started them is gone."""

    def describe(self, rank: int) -> WorkerState:
        """Rank, host, pid and log of a worker, as far as they are known."""

    def kill_all(self) -> None:
        """Kill all processes and wait for their end, in any state."""


class GroupProcesses(WorkerProcesses, Protocol):
    """The processes of a worker group."""

    can_kill_alone: bool  # whether one process can be killed without the others
    can_restart: bool  # whether a lost process can be replaced by a new one

    def all_connected(self) -> None:
        """Called once all workers have said hello."""

    def is_gone(self, rank: int, disconnected: bool) -> bool:
        """Whether nothing is left of a worker, whose connection is closed or is not."""

    def is_stopped(self, rank: int) -> bool:
        """Whether a process is stopped, as by SIGSTOP."""

    def kill_alone(self, rank: int) -> None:
        """Kill one process and no other, if it `can_kill_alone`."""

    def kill(self, rank: int) -> None:
        """Kill one process, if that is possible; others may end with it."""


class ExecutorProcesses(WorkerProcesses, Protocol):
    """The processes of an executor."""

    starts_all_at_once: bool  # whether all are started when the first one is needed
    can_start_more: bool  # whether new processes can replace those that ended

    def close(self) -> None:
        """Release what it holds."""
