"""One worker does everything: the strategy that every other is judged by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import final

from torch import Tensor

from manyhands.data.base import Batch
from manyhands.recipes import optimizers
from manyhands.strategies import state
from manyhands.strategies.base import Outcome, Replicated, Setup, Votes
from manyhands.strategies.sparse_gradients import sparse_parameters, total_norm


@final
class Single(Replicated):
    """Forward and backward of one micro-batch at a time, then one update."""

    def __init__(self, setup: Setup) -> None:
        self.model = setup.model
        self._compute = setup.compute
        self._clip = setup.recipe.clip
        self._optimizer = optimizers.build(
            setup.recipe,
            self.model.named_parameters(),
            optimizers.undecayed(self.model),
            sparse=sparse_parameters(self.model),
        )

    def step(
        self, micro_batches: Iterable[Batch], total: int, lr: float, votes: Callable[[], Votes] = Votes
    ) -> Outcome:
        """Sum the weighted gradients of the micro-batches: the mean gradient of the global batch."""
        mean = 0.0
        for batch in micro_batches:
            loss = self._compute.forward(self.model, batch, weight=batch.size / total)
            self._compute.backward(loss)
            mean += loss.item()
        if self._clip is not None:
            self._compute.clip(self.model.parameters(), self._clip, total_norm)
        optimizers.set_lr(self._optimizer, lr)
        self._compute.update(self._optimizer)
        return Outcome(mean, votes())

    def state(self) -> dict[str, Tensor]:
        """The tensors of the model and of the optimizer state."""
        return state.pack(self.model, self._optimizer)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        state.unpack(tensors, self.model, self._optimizer)
