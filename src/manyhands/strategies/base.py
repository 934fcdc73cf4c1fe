"""The interface of a strategy: a worker makes one step of a global batch, through seams that can be wrapped.

A strategy never looks at a clock (law 7). It computes through `Compute`, exchanges tensors through a
transport and updates through an optimizer. Their cost is measured by wrapping them from outside:

    forward, backward, clip, update  ->  Compute     (wrapped by `TimedCompute`)
    communication, wait              ->  Transport   (wrapped by `CountingTransport`)
    data                             ->  the micro-batches passed to `step` (timed while they are read)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from manyhands.data.base import Batch
from manyhands.data.call import call
from manyhands.data.trees import Tree
from manyhands.recipes.own_recipe import AnyRecipe
from manyhands.strategies.precision import Precision
from manyhands.transports.base import Transport

Norm = Callable[[list[Tensor]], Tensor]


class Votes(NamedTuple):
    """What a worker asks for after a step. If one worker asks, all workers do it."""

    stop: bool = False  # a signal asked for it
    over: bool = False  # the time budget is spent
    save: bool = False  # a checkpoint is due
    skip: bool = False  # its gradients overflow: no worker makes this update

    @property
    def any(self) -> bool:
        """Whether the worker asks for anything but to skip an update."""
        return self.stop or self.over or self.save


class Outcome(NamedTuple):
    """What all workers know after a step."""

    loss: float  # the mean over the global batch, before the update
    votes: Votes  # of all workers together
    shared: bool = True  # false where workers exchanged nothing: the loss is this worker's own, without votes


class Compute:
    """What a worker computes by itself. This is the null member: it adds nothing.

    `run` calls a module with its inputs; offloading replaces it to save memory. With a `precision` that
    scales the loss, gradients are `scale` times too large until they are divided.

    A loss is the mean over its samples, or returns a sum and the weight by which the sum of the global batch
    is divided: the number of tokens, say. That weight is known only after the last backward pass, so
    gradients are first divided by the number of samples, and in the end by `take_weight`, summed over all
    workers.
    """

    def __init__(
        self,
        loss: Callable[[Tree, Tree], Tensor | tuple[Tensor, Tensor]],
        run: Callable[[nn.Module, Tree], Tree] = call,
        precision: Precision | None = None,
    ) -> None:
        self._loss, self._run = loss, run
        self._precision = precision or Precision()
        self._weight: float | None = None

    @property
    def scale(self) -> float:
        """What the gradients of this step are multiplied by."""
        return self._precision.scale

    def autocast(self) -> AbstractContextManager[Any]:
        """Inside, modules are computed in the precision of the run."""
        return self._precision.autocast()

    def overflows(self, gradients: Iterable[Tensor]) -> bool:
        """Whether these gradients are useless, because the loss was scaled too much."""
        return self._precision.overflows(gradients)

    def forward(self, model: nn.Module, batch: Batch, weight: float) -> Tensor:
        """The batch's mean loss times its weight in the global mean (law 4)."""
        with self._precision.autocast():
            loss = self._loss(self._run(model, batch.inputs), batch.targets)
        if isinstance(loss, Tensor):
            return loss if weight == 1.0 else loss * weight
        total, counted = loss
        per_sample = weight / batch.size
        self._weight = (self._weight or 0.0) + float(counted) * per_sample
        return total * per_sample

    def take_weight(self) -> float | None:
        """The weight per sample of all forward passes since the last call.

        None if the loss is a mean over samples: then the gradient is complete.
        """
        weight, self._weight = self._weight, None
        return weight

    def through(self, module: nn.Module, inputs: Tree) -> Tree:
        """Run a part of the model, from its inputs to its outputs."""
        with self._precision.autocast():
            return self._run(module, inputs)

    def backward(self, outputs: Sequence[Tensor] | Tensor, gradients: Sequence[Tensor] | None = None) -> None:
        """Accumulate the gradients of a loss, or of outputs whose gradients are given."""
        if gradients is None and self.scale != 1.0:
            assert isinstance(outputs, Tensor)
            outputs = outputs * self.scale
        torch.autograd.backward(outputs, gradients)

    def divide(self, parameters: Iterable[Tensor], weight: float) -> None:
        """Divide all gradients by the weight of the global batch, and by the scale of the loss.

        If the weight is zero, all of them are zero.
        """
        for parameter in parameters:
            if weight and parameter.grad is not None:
                parameter.grad.div_(weight)

    def clip(self, parameters: Iterable[Tensor], bound: float, norm: Norm = get_total_norm) -> None:
        """Scale the whole gradient to a norm of at most `bound`; `norm` may include other workers' parts."""
        held = list(parameters)
        gradients = [parameter.grad for parameter in held if parameter.grad is not None]
        clip_grads_with_norm_(held, bound, norm(gradients))

    def update(self, optimizer: Optimizer, *, forget: bool = True, skip: bool = False) -> None:
        """Take one optimizer step, unless it is skipped.

        Then drop the gradients, unless they lie in memory of the strategy.
        """
        if not skip:
            optimizer.step()
        self.stepped(skipped=skip)
        if forget:
            optimizer.zero_grad()

    def stepped(self, *, skipped: bool) -> None:
        """Count a step whose update another rank makes; `update` counts the others."""
        self._precision.stepped(skipped=skipped)


def gradients_of(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """The gradients that there are."""
    return (parameter.grad for parameter in parameters if parameter.grad is not None)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every strategy needs to build a worker. The model is on its device and equal at every rank."""

    model: nn.Module
    recipe: AnyRecipe
    compute: Compute
    transport: Transport
    options: Any = None  # the strategy's own options, checked


@dataclass(frozen=True, kw_only=True)
class SynchronousSetup(Setup):
    """For strategies whose workers step together."""

    sync_batchnorm: bool = False  # statistics over the global batch instead of each worker's share
    epoch: int = 0  # training samples per epoch
    example: Callable[[int], Batch] | None = None  # returns that many training samples


@dataclass(frozen=True, kw_only=True)
class PartitionedSetup(SynchronousSetup):
    """For strategies that divide the model among workers, and so measure it or report what they chose."""

    batch: int  # samples per step, over all workers
    example: Callable[[int], Batch]
    choices: dict[str, Any] = field(default_factory=dict)  # chosen by an earlier session, and by this one


class Worker(Protocol):
    """One worker of a synchronous strategy."""

    model: nn.Module  # complete inside `consolidated` and after `finalize`

    def step(
        self, micro_batches: Iterable[Batch], total: int, lr: float, votes: Callable[[], Votes] = Votes
    ) -> Outcome:
        """Train on this worker's part of a global batch of `total` samples.

        `votes` is called as late as possible. Its answer travels with what is exchanged anyway.
        """

    def consolidated(self) -> AbstractContextManager[None]:
        """Inside, `model` is what all workers have learned together. All ranks enter; nothing is changed."""

    def finalize(self) -> None:
        """End the run: `model` becomes what all workers have learned together. All ranks call this."""

    def state(self) -> dict[str, Tensor]:
        """Whole tensors by name, independent of the strategy and of the number of workers.

        All ranks call this, and rank 0 gets the state. The others return whatever costs them nothing.
        """

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state. All ranks call this with the same state."""


class Replicated:
    """A mixin for workers that hold the same complete model after every step."""

    def consolidated(self) -> AbstractContextManager[None]:
        """Return an empty context: the model is always complete."""
        return nullcontext()

    def finalize(self) -> None:
        """Do nothing: the model is always complete."""
