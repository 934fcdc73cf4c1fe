"""Scripted faults where a worker reads and computes; those in collectives are a wrapper of the transport."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing

from torch import Tensor

from manyhands.clock import Clock
from manyhands.data.base import Batch, Dataset, Request
from manyhands.faults import Fault
from manyhands.strategies.base import Compute, Timed


class DrilledCompute(Timed):
    """A timed compute that fails in backward at the scripted moment."""

    def __init__(self, inner: Compute, clock: Clock, due: Callable[[], bool], fault: Fault) -> None:
        super().__init__(inner, clock)
        self._due, self._fault = due, fault

    def backward(self, loss: Tensor) -> None:
        """Fail if it is time, within the phase."""
        if self._due():
            with self._clock.phase("backward"):
                self._fault.strike()
        super().backward(loss)


class DrilledDataset:
    """A data set that fails while it is read at the scripted moment."""

    def __init__(self, inner: Dataset, due: Callable[[], bool], fault: Fault) -> None:
        self._inner, self._due, self._fault = inner, due, fault

    def __len__(self) -> int:
        return len(self._inner)

    def stream(self, requests: Iterable[Request], seed: int) -> Generator[Batch, None, None]:
        """What the data set yields, until it is time to fail."""
        with closing(self._inner.stream(requests, seed)) as stream:
            for batch in stream:
                if self._due():
                    self._fault.strike()
                yield batch
