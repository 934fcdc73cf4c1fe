"""The interface of a launcher: run one function as a gang of workers, or many functions as trials.

`Launcher` is what others see of it, `WorkerProcesses` what it tells who supervises a group of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from manyhands.core.rank_info import ignore
from manyhands.launchers.supervision.diagnosis import Ending, WorkerState


@dataclass(frozen=True)
class Supervision:
    """How a gang is looked after while it works."""

    hear: Callable[[Any], None] = ignore  # what workers `tell`, in the order they told it
    notice: Callable[[str], None] = ignore  # what a person should know: leftovers removed, ...
    logs: Path | None = None  # a folder for the workers' own output, a file a rank; None: nowhere
    timeout: float | None = None  # seconds without a move that count as a hang; None: adapts to the steps
    spare: frozenset[int] = frozenset()  # ranks that may be lost once they have begun ...
    remain: int = 1  # ... as long as so many of them are left
    replacements: int = 0  # how often a lost rank may be started again, where the launcher can
    lost: Callable[[int, str], None] = ignore  # a rank that was lost, and the sentence about it


PLAIN = Supervision()


class Launcher(Protocol):
    """Starts processes and knows nothing of what they compute.

    The function takes its place first, then the arguments; both it and they can be pickled, so that the
    same call works in a thread, a process, an MPI rank, a Ray actor or a Spark task.

    A worker that raises one of our errors ends the gang with that error; one that raises anything else, dies
    or hangs ends it with WorkerFailedError (law 5), unless it is spare: then the others go on, and what it
    would have returned is None. SIGINT and SIGTERM reach the workers through `line.stop`.
    """

    leads: bool  # whether this process decides and writes; false at ranks 1, 2, ... that torchrun started

    def warm_up(self) -> None:
        """Begin with what takes long and will be needed, if anything; returns at once."""

    def launch(
        self, function: Callable[..., Any], workers: int, *arguments: Any, supervision: Supervision = PLAIN
    ) -> list[Any]:
        """Run the function once a worker and return what each of them returned, by rank.

        Where this process does not lead, the leader's function and arguments are run instead.
        """

    def executor(self, workers: int) -> Executor:
        """Run independent calls, `workers` at a time."""


class WorkerProcesses(Protocol):
    """What a launcher knows of the processes it started, or did not start."""

    certain: bool  # whether it tells how each process ended; otherwise a closed line is all there is
    severs: bool  # whether one process can be ended without the others
    restarts: bool  # whether a process can be started in the place of one that is gone

    def start(self, ranks: Sequence[int], title: str) -> None:
        """Let these come; they say hello."""

    def assembled(self) -> None:
        """All of them have said hello."""

    def ended(self) -> dict[int, Ending]:
        """How processes ended, of all that have; WorkerFailedError when it has lost sight of them."""

    def is_gone(self, rank: int, unlinked: bool) -> bool:
        """Whether nothing is left of a worker, whose line is closed or is not."""

    def is_stopped(self, rank: int) -> bool:
        """Whether a process is stopped, as by SIGSTOP."""

    def sever(self, rank: int) -> None:
        """End one process and no other, where it `severs`."""

    def kill(self, rank: int) -> None:
        """End one process, where that is possible; others may end with it."""

    def kill_all(self) -> None:
        """End all of them now and take them back; whatever state this crew is in."""

    def known(self, rank: int) -> WorkerState:
        """Rank, host, process and log of a worker."""
