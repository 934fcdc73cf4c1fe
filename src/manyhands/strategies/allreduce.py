"""Synchronous data parallelism: every worker has the whole model and its share of each batch.

The gradient is the mean over all samples of the global batch (law 4), whoever had how many of them. On a CPU
the workers of a host meet in the arena; on CUDA, DDP's reducer over NCCL is already at the limit (ddp.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import final

import torch
from torch import Tensor

from manyhands.data.base import Batch
from manyhands.recipes import optimizers
from manyhands.strategies import state
from manyhands.strategies.arena import Arena
from manyhands.strategies.base import Agreed, Outcome, Setup, Votes, Worker
from manyhands.strategies.batchnorm import synchronise
from manyhands.strategies.ddp import Ddp
from manyhands.strategies.same import check_same_model, spread_buffers, trained


def allreduce(setup: Setup) -> Worker:
    """The worker for this model's device."""
    if any(parameter.is_cuda for parameter in setup.model.parameters()):
        return Ddp(setup)
    return AllReduce(setup)


@final
class AllReduce(Agreed):
    """Backward into the arena, reduce a slice, update a slice."""

    def __init__(self, setup: Setup) -> None:
        self._transport, self._compute, self._clip = setup.transport, setup.compute, setup.recipe.clip
        check_same_model(setup.model, setup.transport)
        spread_buffers(setup.model, setup.transport)
        self.model = synchronise(setup.model, setup.transport) if setup.sync_batchnorm else setup.model
        self._arena = Arena(self.model, setup.transport, trained(self.model))
        self._arena.spread()
        self._optimizer = optimizers.build(
            setup.recipe, self._arena.slices.items(), optimizers.undecayed(self.model), self._norms
        )

    def step(
        self, micro_batches: Iterable[Batch], total: int, lr: float, votes: Callable[[], Votes] = Votes
    ) -> Outcome:
        """Sum this worker's weighted gradients, then everybody's, a slice a worker."""
        arena, mean, samples = self._arena, 0.0, 0
        arena.begin()
        for batch in micro_batches:
            loss = self._compute.forward(self.model, batch, weight=batch.size / total)
            self._compute.backward(loss)
            mean += loss.item()
            samples += batch.size
        arena.notes.write(mean, votes(), arena.touched, samples / total)
        arena.reduce()
        outcome, missing = arena.notes.read()
        arena.leave_out(missing)
        if self._clip is not None:
            self._compute.clip(arena.slices.values(), self._clip, self._norm)
        optimizers.set_rate(self._optimizer, lr)
        self._compute.update(self._optimizer, forget=False)
        arena.publish()
        return outcome

    def state(self) -> dict[str, Tensor]:
        """Whole tensors, put together from all workers' slices."""
        return state.pack(self.model, self._optimizer, self._arena.whole)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Every worker takes its slices of them."""
        state.unpack(tensors, self.model, self._optimizer, self._arena.part)
        self._arena.notes.rebase()
        self._arena.publish()

    def _norms(self, slices: list[Tensor]) -> Tensor:
        """The norms of whole tensors, of which every worker of this host holds a slice."""
        squares = torch.stack([tensor.square().sum() for tensor in slices])
        return self._transport.on_host.all_reduce(squares).sqrt_()

    def _norm(self, slices: list[Tensor]) -> Tensor:
        """The norm of the whole gradient."""
        if not slices:  # no parameter had a gradient, anywhere
            return torch.zeros(())
        whole: Tensor = torch.linalg.vector_norm(self._norms(slices))
        return whole
