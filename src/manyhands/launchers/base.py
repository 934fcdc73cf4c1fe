"""The interface of a launcher: run one function as a gang of workers, or many functions as trials."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, NamedTuple, Protocol


class Place(NamedTuple):
    """Where one worker of a gang finds itself; how it reaches the others is its transport's business."""

    rank: int
    size: int
    host: str


class Launcher(Protocol):
    """Starts processes and knows nothing of what they compute.

    The function takes its place first, then the arguments; both it and they can be pickled, so that the
    same call works in a thread, a process, an MPI rank, a Ray actor or a Spark task.
    """

    def launch(self, function: Callable[..., Any], workers: int, *arguments: Any) -> list[Any]:
        """Run the function once a worker and return what each of them returned, by rank."""

    def executor(self, workers: int) -> Executor:
        """Run independent calls, `workers` at a time."""
