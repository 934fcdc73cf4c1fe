"""The interface of strategies whose workers go at their own pace: they claim work, and nobody waits in step.

What they share is a ledger of who has claimed what (work_queue.py). Rank 0 keeps the books: it reads the
log of updates, lets the model be evaluated and saved at fences, and says when it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from manyhands.data.base import Batch
from manyhands.data.order import Order
from manyhands.strategies.asynchronous.work_queue import Lease, QueueStage, WorkQueue

LOOK = 0.01  # seconds between two looks at what changes without a word: a worker is gone, a signal came


class Work(NamedTuple):
    """What there is to claim."""

    order: Order
    parts: int  # pieces of a global batch
    tests: int  # samples of the test set
    test_size: int  # that are claimed at a time


class AsyncWorker(Protocol):
    """One rank of such a strategy."""

    model: nn.Module  # at a fence: whole, ready to evaluate
    trains: bool  # false where this rank serves the others
    queue: WorkQueue  # at rank 0, and at all ranks that share it

    def lock(self) -> AbstractContextManager[object]:
        """Inside, the ledger is this rank's alone."""

    def enter(self, look: Callable[[], None]) -> None:
        """Begin; `look` is called often, and whenever this rank waits, with the lock free."""

    def claim(self, known: QueueStage) -> Lease:
        """The next piece to work on; nothing now (LATER) only when the stage is no longer the known one."""

    def step(self, micro_batches: Iterable[Batch], claim: Lease, lr: float) -> None:
        """Train on a claimed piece: its mean gradient updates the parameters."""

    def tested(self, claim: Lease, score: float, loss: float) -> None:
        """A claimed part of the test set is evaluated."""

    def forget(self, rank: int) -> None:
        """Another rank is gone; only rank 0 is told."""

    def serve(self, count: Callable[[], None]) -> None:
        """Where this rank does not train: serve those who do, until it is over; `count` each update."""

    def state(self) -> dict[str, Tensor]:
        """Whole tensors by name, as any strategy's; only rank 0 asks, at a fence."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state; all ranks do, with the same."""
