"""The interface of a strategy: a worker makes one step of a global batch, and the seams it works through.

A strategy never looks at a clock (law 7). It computes through `Compute`, exchanges through a transport and
updates through an optimizer; whoever wants to know what these cost wraps them from outside:

    forward, backward, clip, update  ->  Compute     (wrapped by `TimedCompute`)
    communication, wait              ->  Transport   (wrapped by the transports' wrappers)
    data                             ->  the micro-batches handed to `step` (timed while they are drawn)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from manyhands.data.base import Batch
from manyhands.recipes.base import Recipe
from manyhands.strategies.asynchronous.base import Work
from manyhands.transports.base import Transport

Norm = Callable[[list[Tensor]], Tensor]


class Votes(NamedTuple):
    """What a worker wishes to happen after a step: what any of them wishes happens at all of them."""

    stop: bool = False  # a signal asked for it
    over: bool = False  # the time is spent
    save: bool = False  # a checkpoint is due

    @property
    def any(self) -> bool:
        """Whether there is a wish at all."""
        return self.stop or self.over or self.save


class Outcome(NamedTuple):
    """What all workers know after a step."""

    loss: float  # the mean over the global batch, before the update
    votes: Votes  # of all workers together
    shared: bool = True  # false where workers have not talked: the loss is this worker's own, nobody voted


def plainly(module: nn.Module, inputs: Tensor) -> Tensor:
    """Call it."""
    outputs: Tensor = module(inputs)
    return outputs


class Compute:
    """What a worker does by itself; the null member: nothing is added to it.

    `run` calls a module with its inputs; one that spares memory does it in other ways (`memory`).
    """

    def __init__(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        run: Callable[[nn.Module, Tensor], Tensor] = plainly,
    ) -> None:
        self._loss, self._run = loss, run

    def forward(self, model: nn.Module, batch: Batch, weight: float) -> Tensor:
        """The batch's mean loss times its weight in the global mean (law 4)."""
        loss = self._loss(self._run(model, batch.inputs), batch.targets)
        return loss if weight == 1.0 else loss * weight

    def through(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """A part of the model, from its inputs to its outputs."""
        return self._run(module, inputs)

    def backward(self, outputs: Tensor, gradient: Tensor | None = None) -> None:
        """Add the gradients of a loss, or of a part's outputs given theirs, to the parameters'."""
        outputs.backward(gradient)  # type: ignore[no-untyped-call]

    def clip(self, parameters: Iterable[Tensor], bound: float, norm: Norm = get_total_norm) -> None:
        """Scale the whole gradient down to a norm of at most `bound`; `norm` may know of parts elsewhere."""
        held = list(parameters)
        gradients = [parameter.grad for parameter in held if parameter.grad is not None]
        clip_grads_with_norm_(held, bound, norm(gradients))

    def update(self, optimizer: Optimizer, *, forget: bool = True) -> None:
        """Take one optimizer step, and forget the gradients unless they live in memory of the strategy's."""
        optimizer.step()
        if forget:
            optimizer.zero_grad()


@dataclass(frozen=True)
class Setup:
    """What a strategy is given to make a worker: the model is on its device, the same at every rank."""

    model: nn.Module
    recipe: Recipe
    compute: Compute
    transport: Transport
    sync_batchnorm: bool = False  # statistics over the global batch instead of each worker's share
    options: Any = None  # the strategy's own, checked
    epoch: int = 0  # training samples
    work: Work | None = None  # what there is to claim, where workers go at their own pace
    joining: bool = False  # whether the others are at work already
    batch: int = 1  # samples of a step, over all workers
    example: Callable[[int], Batch] | None = None  # so many training samples, to measure with
    choices: dict[str, Any] = field(default_factory=dict)  # what the strategy chose, or did before


class Worker(Protocol):
    """One worker of a strategy."""

    model: nn.Module  # whole, ready to evaluate

    def step(
        self, micro_batches: Iterable[Batch], total: int, lr: float, votes: Callable[[], Votes] = Votes
    ) -> Outcome:
        """Train on this worker's part of a global batch of `total` samples.

        `votes` is asked as late as possible; what it answers travels with what is exchanged anyway.
        """

    def whole(self) -> AbstractContextManager[None]:
        """Inside, `model` is what all workers have learned together; all enter, and nothing is changed."""

    def settle(self) -> None:
        """The run is over: `model` is now what all have learned together; all of them do this."""

    def state(self) -> dict[str, Tensor]:
        """Whole tensors by name, independent of the strategy and the number of workers.

        All of them ask, and rank 0 gets it: what the others return is whatever costs them nothing.
        """

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state; all of them do, with the same."""


class Replicated:
    """For workers whose models are the same after every step: what is whole always is."""

    def whole(self) -> AbstractContextManager[None]:
        """It is."""
        return nullcontext()

    def settle(self) -> None:
        """It has."""
