"""The step of workers that sum their gradients before one update, however they compute them."""

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
    """Where gradients are collected and summed, and the part of the parameters that this worker updates."""

    header: StepHeader

    @property
    def slices(self) -> Mapping[str, Tensor]:
        """What this worker updates, with the summed gradients as `.grad`."""

    @property
    def own(self) -> Iterator[Tensor]:
        """The gradients that this worker has computed in this step, before they are summed."""

    @property
    def touched(self) -> Sequence[bool]:
        """Which parameters got a gradient here; those that other workers compute count as touched."""

    def begin(self) -> None:
        """Discard the gradients of the last step."""

    def reduce(self) -> None:
        """Sum gradients and step headers over all workers."""

    def skip(self, missing: list[int]) -> None:
        """Do not update parameters that got no gradient at any worker."""

    def publish(self) -> None:
        """Announce that this worker's part is up to date; return when all parts are."""

    def norms(self, slices: list[Tensor]) -> Tensor:
        """The norms of the whole tensors of which these are slices."""

    def norm(self, slices: list[Tensor]) -> Tensor:
        """The norm of all slices of all workers together."""

    def consolidated(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, the model is complete at every worker."""

    def collect(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        """The state in whole tensors, at rank 0."""

    def restore(self, tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
        """Load this worker's part of a state."""


class SynchronousWorker(ABC):
    """Computes the gradients of its share of the batch, sums them with the others', updates its part."""

    def __init__(self, setup: Setup, model: nn.Module, gradients: Gradients) -> None:
        self._compute, self._clip = setup.compute, setup.recipe.clip
        self.model, self._gradients = model, gradients
        self._optimizer = optimizers.for_model(setup.recipe, model, gradients.slices, norms=gradients.norms)

    @abstractmethod
    def accumulate(self, micro_batches: Iterator[Batch], total: int) -> tuple[float, int]:
        """Accumulate this worker's gradients. Return its part of the mean loss and its number of samples."""

    def step(
        self, micro_batches: Iterable[Batch], total: int, lr: float, votes: Callable[[], Votes] = Votes
    ) -> Outcome:
        """Accumulate weighted gradients, sum them over all workers, and update this worker's part."""
        gradients = self._gradients
        gradients.begin()
        mean, samples = self.accumulate(iter(micro_batches), total)
        weight = self._compute.take_weight()
        asked = votes()._replace(skip=self._compute.overflows(gradients.own))
        gradients.header.write(mean, asked, gradients.touched, samples / total, weight)
        gradients.reduce()
        outcome, missing = gradients.header.read()
        gradients.skip(missing)
        if (divisor := (gradients.header.weight or 1.0) * self._compute.scale) != 1.0:
            self._compute.divide(gradients.slices.values(), divisor)
        if self._clip is not None:
            self._compute.clip(gradients.slices.values(), self._clip, gradients.norm)
        optimizers.set_lr(self._optimizer, lr)
        self._compute.update(self._optimizer, forget=False, skip=outcome.votes.skip)
        gradients.publish()
        return outcome

    def consolidated(self) -> AbstractContextManager[None]:
        return self._gradients.consolidated(self.model)

    def finalize(self) -> None:
        """Complete the model at every worker, for good."""
        with self.consolidated():
            pass

    def state(self) -> dict[str, Tensor]:
        """Whole tensors, put together from all workers' parts."""
        return self._gradients.collect(self.model, self._optimizer)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load this worker's parts of the tensors."""
        self._gradients.restore(tensors, self.model, self._optimizer)
        self._gradients.header.rebase()
        self._gradients.publish()
