"""A compute whose phases are charged to a clock: strategies are timed from outside (law 7)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from manyhands.data.base import Batch
from manyhands.data.trees import Tree
from manyhands.engine.compute_wrapper import ComputeWrapper
from manyhands.engine.timing.clock import Clock
from manyhands.strategies.base import Compute, Norm


class TimedCompute(ComputeWrapper):
    """Charges forward, backward and optimizer to a clock."""

    def __init__(self, inner: Compute, clock: Clock) -> None:
        super().__init__(inner)
        self._clock = clock

    def forward(self, model: nn.Module, batch: Batch, weight: float) -> Tensor:
        with self._clock.phase("forward"):
            return self._inner.forward(model, batch, weight)

    def through(self, module: nn.Module, inputs: Tree) -> Tree:
        with self._clock.phase("forward"):
            return self._inner.through(module, inputs)

    def backward(self, outputs: Sequence[Tensor] | Tensor, gradients: Sequence[Tensor] | None = None) -> None:
        with self._clock.phase("backward"):
            self._inner.backward(outputs, gradients)

    def divide(self, parameters: Iterable[Tensor], weight: float) -> None:
        with self._clock.phase("optimizer"):
            self._inner.divide(parameters, weight)

    def clip(self, parameters: Iterable[Tensor], bound: float, norm: Norm = get_total_norm) -> None:
        with self._clock.phase("optimizer"):
            self._inner.clip(parameters, bound, norm)

    def update(self, optimizer: Optimizer, *, forget: bool = True, skip: bool = False) -> None:
        with self._clock.phase("optimizer"):
            self._inner.update(optimizer, forget=forget, skip=skip)
