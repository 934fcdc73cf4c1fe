"""Synchronous data parallelism: every worker has the whole model and its share of each batch.

The gradient is the mean over all samples of the global batch (law 4), however unevenly they are divided. On a
CPU the workers of a host use the arena; on CUDA, DDP's reducer over NCCL is already at the limit (ddp.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from manyhands.data.base import Batch
from manyhands.strategies.base import SynchronousSetup, Worker
from manyhands.strategies.consistency import broadcast_buffers, check_same_model, trained_parameters
from manyhands.strategies.data_parallel.arena import Arena
from manyhands.strategies.data_parallel.batchnorm import synchronize
from manyhands.strategies.data_parallel.ddp import Ddp
from manyhands.strategies.synchronous import SynchronousWorker


def allreduce(setup: SynchronousSetup) -> Worker:
    """The worker for this model's device."""
    if any(parameter.is_cuda for parameter in setup.model.parameters()):
        return Ddp(setup)
    return AllReduce(setup)


@final
class AllReduce(SynchronousWorker):
    """Backward into the arena, then reduce one slice and update one slice."""

    def __init__(self, setup: SynchronousSetup) -> None:
        check_same_model(setup.model, setup.transport)
        broadcast_buffers(setup.model, setup.transport)
        model = synchronize(setup.model, setup.transport) if setup.sync_batchnorm else setup.model
        arena = Arena(model, setup.transport, trained_parameters(model), scope=setup.recipe.scope)
        arena.broadcast()
        super().__init__(setup, model, arena)

    def accumulate(self, micro_batches: Iterator[Batch], total: int) -> tuple[float, int]:
        """Run one micro-batch after the other."""
        mean, samples = 0.0, 0
        for batch in micro_batches:
            loss = self._compute.forward(self.model, batch, weight=batch.size / total)
            self._compute.backward(loss)
            mean += loss.item()
            samples += batch.size
        return mean, samples
