"""A compute around another one: what is added to computing wraps it, and strategies do not know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from manyhands.data.base import Batch
from manyhands.data.trees import Tree
from manyhands.strategies.base import Compute, Norm


class ComputeWrapper(Compute):
    """Passes everything on to another compute. What is to be different is overridden."""

    def __init__(self, inner: Compute) -> None:
        self._inner = inner

    @property
    def scale(self) -> float:
        return self._inner.scale

    def autocast(self) -> AbstractContextManager[Any]:
        return self._inner.autocast()

    def overflows(self, gradients: Iterable[Tensor]) -> bool:
        return self._inner.overflows(gradients)

    def forward(self, model: nn.Module, batch: Batch, weight: float) -> Tensor:
        return self._inner.forward(model, batch, weight)

    def take_weight(self) -> float | None:
        return self._inner.take_weight()

    def through(self, module: nn.Module, inputs: Tree) -> Tree:
        return self._inner.through(module, inputs)

    def backward(self, outputs: Sequence[Tensor] | Tensor, gradients: Sequence[Tensor] | None = None) -> None:
        self._inner.backward(outputs, gradients)

    def divide(self, parameters: Iterable[Tensor], weight: float) -> None:
        self._inner.divide(parameters, weight)

    def clip(self, parameters: Iterable[Tensor], bound: float, norm: Norm = get_total_norm) -> None:
        self._inner.clip(parameters, bound, norm)

    def update(self, optimizer: Optimizer, *, forget: bool = True, skip: bool = False) -> None:
        self._inner.update(optimizer, forget=forget, skip=skip)

    def stepped(self, *, skipped: bool) -> None:
        self._inner.stepped(skipped=skipped)
