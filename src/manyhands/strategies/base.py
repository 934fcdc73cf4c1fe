"""The interface of a strategy: a worker makes one step of a global batch, and the seams it works through.

A strategy never looks at a clock (law 7). It computes through `Compute`, exchanges through a transport and
updates through an optimiser; whoever wants to know what these cost wraps them from outside:

    forward, backward, clip, update  ->  Compute     (wrapped by `Timed`)
    communication, wait              ->  Transport   (wrapped by the transports' wrappers)
    data                             ->  the micro-batches handed to `step` (timed while they are drawn)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from manyhands.clock import Clock
from manyhands.data.base import Batch
from manyhands.recipes.base import Recipe
from manyhands.transports.base import Transport


class Compute:
    """What a worker does by itself; the null member: nothing is added to it."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._loss = loss

    def forward(self, model: nn.Module, batch: Batch, weight: float) -> Tensor:
        """The batch's mean loss times its weight in the global mean (law 4)."""
        loss = self._loss(model(batch.inputs), batch.targets)
        return loss if weight == 1.0 else loss * weight

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to the parameters'."""
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, parameters: Iterable[Tensor], bound: float) -> None:
        """Scale the whole gradient down to a norm of at most `bound`."""
        clip_grad_norm_(parameters, bound)

    def update(self, optimizer: Optimizer) -> None:
        """Take one optimiser step and forget the gradients."""
        optimizer.step()
        optimizer.zero_grad()


class Timed(Compute):
    """A compute whose phases are charged to a clock."""

    def __init__(self, inner: Compute, clock: Clock) -> None:
        self._inner, self._clock = inner, clock

    def forward(self, model: nn.Module, batch: Batch, weight: float) -> Tensor:
        """Timed as forward."""
        with self._clock.phase("forward"):
            return self._inner.forward(model, batch, weight)

    def backward(self, loss: Tensor) -> None:
        """Timed as backward."""
        with self._clock.phase("backward"):
            self._inner.backward(loss)

    def clip(self, parameters: Iterable[Tensor], bound: float) -> None:
        """Timed as optimiser."""
        with self._clock.phase("optimiser"):
            self._inner.clip(parameters, bound)

    def update(self, optimizer: Optimizer) -> None:
        """Timed as optimiser."""
        with self._clock.phase("optimiser"):
            self._inner.update(optimizer)


@dataclass(frozen=True)
class Setup:
    """What a strategy is given to make a worker: the model is on its device, the same at every rank."""

    model: nn.Module
    recipe: Recipe
    compute: Compute
    transport: Transport


class Worker(Protocol):
    """One worker of a strategy."""

    model: nn.Module  # whole, ready to evaluate

    def step(self, micro_batches: Iterable[Batch], total: int, lr: float) -> float:
        """Train on this worker's part of a global batch of `total` samples; return the global mean loss."""

    def state(self) -> dict[str, Tensor]:
        """Whole tensors by name, independent of the strategy and the number of workers."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state."""
