"""Hogwild: all workers read and write the same parameters in memory, without locks (Niu et al. 2011).

    parameters  [ w w w w w w w w w w w w w w ]     once, in shared memory; buffers beside them
                  ^ ^     ^   ^ ^         ^
      worker 0   r w      r   w           r         forward reads, the update writes, whoever else does
      worker 1      r   w     r w         w

An update adds to numbers that others may be adding to: some additions are lost, and a gradient is of
parameters that have moved on meanwhile. With sparse gradients, where an update writes the rows it touched and
nothing else, workers rarely meet; with dense ones they meet all the time and it works all the same, as long
as the rate is small for the number of workers.

A worker's momentum is its own: it repeats the gradients of its own past, which the others have long acted
upon, and asynchrony by itself already acts like momentum (Mitliagkas et al. 2016). So it is off unless asked
for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from manyhands.data.base import Batch
from manyhands.recipes import optimizers
from manyhands.strategies import state
from manyhands.strategies.asynchronous.base import LOOK
from manyhands.strategies.asynchronous.work_queue import Lease, LeaseKind, QueueStage, WorkQueue
from manyhands.strategies.base import Setup
from manyhands.strategies.consistency import check_same_model, spread_buffers
from manyhands.strategies.flat_layout import ParameterSlot, laid, lay_out
from manyhands.strategies.sparse_gradients import sparse_parameters, total_norm


@final
class Hogwild:
    """One worker: forward and backward on what all share, then an update that asks nobody."""

    trains = True

    def __init__(self, setup: Setup) -> None:
        assert setup.work is not None
        self._transport, self._compute, self._clip = setup.transport, setup.compute, setup.recipe.clip
        self._work, self._joining = setup.work, setup.joining
        self.model, self.rank = setup.model, setup.transport.rank
        if not setup.joining:
            check_same_model(setup.model, setup.transport)
            spread_buffers(setup.model, setup.transport)
        self._move_in()
        ranks = setup.transport.size
        memory = setup.transport.share("ledger", WorkQueue.size(ranks))
        self.queue = WorkQueue(memory.numpy(), ranks, setup.work.order, setup.work.parts)
        self._optimizer = optimizers.build(
            setup.recipe,
            self.model.named_parameters(),
            optimizers.undecayed(self.model),
            sparse=sparse_parameters(self.model),
        )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One worker of the host at a time; what one that was killed inside had begun is undone."""
        with self._transport.lock(), self.queue.changing(self.rank):
            yield

    def enter(self, look: Callable[[], None]) -> None:
        """From now on this worker claims."""
        self._look = look
        with self.lock():
            self.queue.enter(self.rank)

    def claim(self, known: QueueStage) -> Lease:
        """From the ledger; where there is nothing, look again and again."""
        queue, work = self.queue, self._work
        while True:
            self._look()
            with self.lock():
                found = queue.claim(self.rank, work.test_size, work.tests)
            if found.kind is not LeaseKind.LATER or found.stage is not known:
                return found
            self._transport.wait_for(lambda: queue.stage is not known or queue.has_work, LOOK)

    def step(self, micro_batches: Iterable[Batch], claim: Lease, lr: float) -> None:
        """As one worker alone would, on parameters that the others change meanwhile."""
        queue, compute, mean = self.queue, self._compute, 0.0
        version = -1
        for batch in micro_batches:
            if version < 0:
                version = queue.updates
            loss = compute.forward(self.model, batch, weight=batch.size / claim.size)
            compute.backward(loss)
            mean += loss.item()
        if self._clip is not None:
            compute.clip(self.model.parameters(), self._clip, total_norm)
        optimizers.set_lr(self._optimizer, lr)
        compute.update(self._optimizer)
        while queue.is_full:
            self._look()
            self._transport.wait_for(lambda: not queue.is_full, LOOK, "room")
        with self.lock():
            queue.trained(self.rank, mean, lr, queue.updates - version)

    def tested(self, claim: Lease, score: float, loss: float) -> None:
        """Into the ledger."""
        with self.lock():
            self.queue.tested(self.rank, score, loss)

    def forget(self, rank: int) -> None:
        """Nobody waits for anybody."""

    def serve(self, count: Callable[[], None]) -> None:
        """Nobody serves here."""
        raise AssertionError

    def state(self) -> dict[str, Tensor]:
        """The model is everybody's, the optimizer's memory this worker's."""
        return state.pack(self.model, self._optimizer)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The first worker writes what all share; each takes the optimizer's memory."""
        if self.rank == 0:
            state.unpack_model(tensors, self.model)
        state.unpack_optimizer(tensors, self._optimizer)
        self._transport.barrier()

    def _move_in(self) -> None:
        """Parameters and buffers give up their own memory for the shared one; the first worker fills it."""
        shared: dict[str, Tensor] = dict(self.model.named_parameters())
        shared |= dict(self.model.named_buffers())
        places: list[tuple[ParameterSlot, Tensor]] = []
        for kind in dict.fromkeys(tensor.dtype for tensor in shared.values()):
            spots, length = lay_out((name, t) for name, t in sorted(shared.items()) if t.dtype == kind)
            name = f"parameters {str(kind).removeprefix('torch.')}"
            flat = self._transport.share(name, max(1, length) * kind.itemsize).view(kind)
            places += [(spot, laid(flat, spot)) for spot in spots]
        with torch.no_grad():
            if self.rank == 0 and not self._joining:
                for spot, place in places:
                    place.copy_(spot.parameter)
            if not self._joining:
                self._transport.barrier()
            for spot, place in places:
                spot.parameter.data = place
