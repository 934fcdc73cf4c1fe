"""The interface of a launcher: run one function as a gang of workers, or many functions as trials."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from manyhands.place import ignore


@dataclass(frozen=True)
class Care:
    """How a gang is looked after while it works."""

    hear: Callable[[Any], None] = ignore  # what workers `tell`, in the order they told it
    notice: Callable[[str], None] = ignore  # what a person should know: leftovers removed, ...
    logs: Path | None = None  # a folder for the workers' own output, a file a rank; None: nowhere
    timeout: float | None = None  # seconds without a move that count as a hang; None: adapts to the steps


PLAIN = Care()


class Launcher(Protocol):
    """Starts processes and knows nothing of what they compute.

    The function takes its place first, then the arguments; both it and they can be pickled, so that the
    same call works in a thread, a process, an MPI rank, a Ray actor or a Spark task.

    A worker that raises one of our errors ends the gang with that error; one that raises anything else, dies
    or hangs ends it with WorkerFailedError (law 5). SIGINT and SIGTERM reach the workers through `line.stop`.
    """

    leads: bool  # whether this process decides and writes; false at ranks 1, 2, ... that torchrun started

    def warm_up(self) -> None:
        """Begin with what takes long and will be needed, if anything; returns at once."""

    def launch(
        self, function: Callable[..., Any], workers: int, *arguments: Any, care: Care = PLAIN
    ) -> list[Any]:
        """Run the function once a worker and return what each of them returned, by rank.

        Where this process does not lead, the leader's function and arguments are run instead.
        """

    def executor(self, workers: int) -> Executor:
        """Run independent calls, `workers` at a time."""
