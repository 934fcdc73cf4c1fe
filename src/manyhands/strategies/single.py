"""One worker does everything: the strategy that every other is judged by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import final

from torch import Tensor

from manyhands.data.base import Batch
from manyhands.recipes import optimizers
from manyhands.strategies import state
from manyhands.strategies.base import Outcome, Replicated, Setup, Votes, gradients_of
from manyhands.strategies.sparse_gradients import total_norm


@final
class Single(Replicated):
    """Forward and backward of one micro-batch at a time, then one update."""

    def __init__(self, setup: Setup) -> None:
        self.model = setup.model
        self._compute = setup.compute
        self._clip = setup.recipe.clip
        self._optimizer = optimizers.for_model(setup.recipe, self.model, sparse=True)

    def step(
        self, micro_batches: Iterable[Batch], total: int, lr: float, votes: Callable[[], Votes] = Votes
    ) -> Outcome:
        """Sum the weighted gradients of the micro-batches: the mean gradient of the global batch."""
        mean = 0.0
        for batch in micro_batches:
            loss = self._compute.forward(self.model, batch, weight=batch.size / total)
            self._compute.backward(loss)
            mean += loss.item()
        weight = self._compute.take_weight() or 1.0
        mean /= weight
        skip = self._compute.overflows(gradients_of(self.model.parameters()))
        if (divisor := weight * self._compute.scale) != 1.0:
            self._compute.divide(self.model.parameters(), divisor)
        if self._clip is not None:
            self._compute.clip(self.model.parameters(), self._clip, total_norm)
        optimizers.set_lr(self._optimizer, lr)
        self._compute.update(self._optimizer, skip=skip)
        return Outcome(mean, votes()._replace(skip=skip))

    def state(self) -> dict[str, Tensor]:
        """The tensors of the model and of the optimizer state."""
        return state.pack(self.model, self._optimizer)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        state.unpack(tensors, self.model, self._optimizer)
