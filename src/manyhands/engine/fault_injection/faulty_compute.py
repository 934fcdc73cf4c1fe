"""Scripted faults and slowness in computing and in reading data."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing

from torch import Tensor, nn

from manyhands.data.base import Batch, Dataset, Request
from manyhands.data.trees import Tree
from manyhands.engine.compute_wrapper import ComputeWrapper
from manyhands.engine.fault_injection.faults import Fault
from manyhands.engine.timing.clock import Clock
from manyhands.engine.timing.timed_compute import TimedCompute
from manyhands.strategies.base import Compute


class SlowedCompute(ComputeWrapper):
    """A straggler: after each forward and backward it sleeps as long as a slower machine would compute."""

    def __init__(self, inner: Compute, factor: float) -> None:
        super().__init__(inner)
        self._more = factor - 1.0

    def forward(self, model: nn.Module, batch: Batch, weight: float) -> Tensor:
        since = time.perf_counter()
        loss = self._inner.forward(model, batch, weight)
        time.sleep(self._more * (time.perf_counter() - since))
        return loss

    def through(self, module: nn.Module, inputs: Tree) -> Tree:
        since = time.perf_counter()
        outputs = self._inner.through(module, inputs)
        time.sleep(self._more * (time.perf_counter() - since))
        return outputs

    def backward(self, outputs: Sequence[Tensor] | Tensor, gradients: Sequence[Tensor] | None = None) -> None:
        since = time.perf_counter()
        self._inner.backward(outputs, gradients)
        time.sleep(self._more * (time.perf_counter() - since))


class FaultyCompute(TimedCompute):
    """A timed compute that fails in backward at the scripted moment."""

    def __init__(self, inner: Compute, clock: Clock, due: Callable[[], bool], fault: Fault) -> None:
        super().__init__(inner, clock)
        self._due, self._fault = due, fault

    def backward(self, outputs: Sequence[Tensor] | Tensor, gradients: Sequence[Tensor] | None = None) -> None:
        """Fail within the phase, if the fault is due."""
        if self._due():
            with self._clock.phase("backward"):
                self._fault.strike()
        super().backward(outputs, gradients)


class FaultyDataset:
    """A data set that fails at the scripted moment while it is read."""

    def __init__(self, inner: Dataset, due: Callable[[], bool], fault: Fault) -> None:
        self._inner, self._due, self._fault = inner, due, fault

    def __len__(self) -> int:
        return len(self._inner)

    def stream(self, requests: Iterable[Request], seed: int) -> Generator[Batch, None, None]:
        """The batches of the data set, until the fault is due."""
        with closing(self._inner.stream(requests, seed)) as stream:
            for batch in stream:
                if self._due():
                    self._fault.strike()
                yield batch
