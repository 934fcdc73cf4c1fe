"""One step of workers whose gradients are summed before one update: what they share, however they compute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.data.base import Batch
from manyhands.recipes import optimizers
from manyhands.strategies.base import Outcome, Setup, Votes
from manyhands.strategies.step_header import StepHeader


class Gradients(Protocol):
    """Where gradients are caught and summed, and the part of the parameters that this worker updates."""

    notes: StepHeader

    @property
    def slices(self) -> Mapping[str, Tensor]:
        """What this worker updates, the summed gradients as `.grad`."""

    @property
    def touched(self) -> Sequence[bool]:
        """Which parameters had a gradient here; those that others compute count as had."""

    def begin(self) -> None:
        """Forget the last step's gradients."""

    def reduce(self) -> None:
        """Sum gradients and notes over all workers."""

    def leave_out(self, missing: list[int]) -> None:
        """Parameters without a gradient at any worker are not updated."""

    def publish(self) -> None:
        """This worker's part is up to date; return when everybody may go on."""

    def norms(self, slices: list[Tensor]) -> Tensor:
        """The norms of the whole tensors of which these are slices."""

    def norm(self, slices: list[Tensor]) -> Tensor:
        """The norm of everything together."""

    def whole(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, the model is whole at every worker."""

    def collect(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        """The state in whole tensors, at rank 0."""

    def restore(self, tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
        """Take this worker's part of a state."""


class SynchronousWorker(ABC):
    """Gradients of a share of the batch, summed with everybody's; then each worker updates a part."""

    def __init__(self, setup: Setup, model: nn.Module, gradients: Gradients) -> None:
        self._compute, self._clip = setup.compute, setup.recipe.clip
        self.model, self._gradients = model, gradients
        self._optimizer = optimizers.build(
            setup.recipe, gradients.slices.items(), optimizers.undecayed(model), gradients.norms
        )

    @abstractmethod
    def accumulate(self, micro_batches: Iterator[Batch], total: int) -> tuple[float, int]:
        """Add up this worker's gradients; return its part of the mean loss, and the samples it stands for."""

    def step(
        self, micro_batches: Iterable[Batch], total: int, lr: float, votes: Callable[[], Votes] = Votes
    ) -> Outcome:
        """Sum this worker's weighted gradients, then everybody's; update a part."""
        gradients = self._gradients
        gradients.begin()
        mean, samples = self.accumulate(iter(micro_batches), total)
        gradients.notes.write(mean, votes(), gradients.touched, samples / total)
        gradients.reduce()
        outcome, missing = gradients.notes.read()
        gradients.leave_out(missing)
        if self._clip is not None:
            self._compute.clip(gradients.slices.values(), self._clip, gradients.norm)
        optimizers.set_lr(self._optimizer, lr)
        self._compute.update(self._optimizer, forget=False)
        gradients.publish()
        return outcome

    def whole(self) -> AbstractContextManager[None]:
        """What all have learned together."""
        return self._gradients.whole(self.model)

    def settle(self) -> None:
        """The model stays whole."""
        with self.whole():
            pass

    def state(self) -> dict[str, Tensor]:
        """Whole tensors, put together from all workers' parts."""
        return self._gradients.collect(self.model, self._optimizer)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Every worker takes its parts of them."""
        self._gradients.restore(tensors, self.model, self._optimizer)
        self._gradients.notes.rebase()
        self._gradients.publish()
