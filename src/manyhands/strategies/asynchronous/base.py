"""The interface of asynchronous strategies: workers lease work, and no worker waits for a common step.

There are three roles, and a rank may have two of them:

    AsyncWorker       leases samples, trains on them, evaluates parts of the test set    every training rank
    ParameterServer   answers the workers until the run is over                          a rank that serves
    QueueOwner        holds the work queue and the state of the model                    rank 0

The work queue (work_queue.py) records which rank has leased which samples. Rank 0 reads the log of updates,
lets the model be evaluated and saved at sync points, and decides when the run is over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from manyhands.data.base import Batch
from manyhands.data.order import Order
from manyhands.strategies.asynchronous.work_queue import EvaluationSums, Lease, QueueStage, WorkQueue
from manyhands.strategies.base import Setup

POLL_SECONDS = 0.01  # between two looks at what changes without a message: a worker is gone, a signal came


class Work(NamedTuple):
    """What there is to lease."""

    order: Order
    parts: int  # pieces of a global batch
    tests: int  # samples of the test set
    test_size: int  # samples of the test set per lease


@dataclass(frozen=True, kw_only=True)
class AsynchronousSetup(Setup):
    """For strategies whose workers do not step together."""

    work: Work
    joining: bool = False  # whether the other ranks are training already


class AsyncWorker(ABC):
    """A rank that trains."""

    model: nn.Module  # at a sync point: complete, ready to evaluate

    @abstractmethod
    def enter(self) -> None:
        """Begin to ask for leases."""

    @abstractmethod
    def lease(self, stage: QueueStage) -> Lease:
        """The next piece to work on. LATER (nothing now) is returned only when the stage has changed."""

    @abstractmethod
    def step(self, micro_batches: Iterable[Batch], lease: Lease, lr: float) -> None:
        """Train on a leased piece: its mean gradient updates the parameters."""

    @abstractmethod
    def tested(self, sums: EvaluationSums) -> None:
        """Report the evaluation of the leased part of the test set."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state. All ranks call this with the same state."""


class ParameterServer(ABC):
    """A rank that serves the ranks that train."""

    model: nn.Module  # at a sync point: complete, ready to save

    @abstractmethod
    def serve(self, count: Callable[[], None]) -> None:
        """Serve until the run is over; call `count` after each update."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state. All ranks call this with the same state."""


AsyncRank = AsyncWorker | ParameterServer


class QueueOwner(ABC):
    """Rank 0, whether it trains or serves: it has the work queue and the state of the whole model."""

    queue: WorkQueue

    @abstractmethod
    def poll_with(self, poll: Callable[[], None]) -> None:
        """Call `poll` often, and whenever this rank waits; never while the lock is held."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[object]:
        """Inside, no other rank uses the queue."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Whole tensors by name, as of any strategy; called at a sync point."""

    @abstractmethod
    def forget(self, rank: int) -> None:
        """Drop what this rank keeps for another rank that is gone."""
