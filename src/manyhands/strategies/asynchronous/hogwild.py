"""Hogwild: all workers read and write the same parameters in memory, without locks (Niu et al. 2011).

    parameters  [ w w w w w w w w w w w w w w ]     once, in shared memory, and the buffers
                  ^ ^     ^   ^ ^         ^
      worker 0   r w      r   w           r         forward reads and the update writes, at any time
      worker 1      r   w     r w         w

An update adds to elements that other workers may be adding to. Some additions are lost, and parameters may
have changed since a gradient was computed. With sparse gradients an update writes only the rows it touched,
and workers rarely collide; with dense gradients they collide all the time. It still works as long as the
learning rate is small for the number of workers.

A worker's momentum is its own: it repeats gradients of its own past, which the others have acted upon since,
and asynchrony by itself already acts like momentum (Mitliagkas et al. 2016). So momentum is off by default.
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
from manyhands.strategies.asynchronous.base import POLL_SECONDS, AsynchronousSetup, AsyncWorker, QueueOwner
from manyhands.strategies.asynchronous.work_queue import (
    EvaluationSums,
    Lease,
    LeaseKind,
    QueueStage,
    WorkQueue,
)
from manyhands.strategies.base import gradients_of
from manyhands.strategies.consistency import broadcast_buffers, check_same_model
from manyhands.strategies.flat_layout import ParameterSlot, lay_out
from manyhands.strategies.sparse_gradients import total_norm


@final
class Hogwild(AsyncWorker, QueueOwner):
    """One worker: forward and backward on the shared parameters, then an update without a lock.

    The queue lies in shared memory too, so every rank leases from it directly.
    """

    def __init__(self, setup: AsynchronousSetup) -> None:
        self._transport, self._compute, self._clip = setup.transport, setup.compute, setup.recipe.clip
        self._work, self._joining = setup.work, setup.joining
        self.model, self.rank = setup.model, setup.transport.rank
        if not setup.joining:
            check_same_model(setup.model, setup.transport)
            broadcast_buffers(setup.model, setup.transport)
        self._share_model()
        ranks = setup.transport.size
        memory = setup.transport.share("queue", WorkQueue.size(ranks))
        self.queue = WorkQueue(memory.numpy(), ranks, setup.work.order, setup.work.parts)
        self._poll: Callable[[], None] = lambda: None  # only rank 0 has something to poll
        self._optimizer = optimizers.for_model(setup.recipe, self.model, sparse=True)

    # ---- a worker

    def enter(self) -> None:
        with self.lock():
            self.queue.enter(self.rank)

    def lease(self, stage: QueueStage) -> Lease:
        """Lease from the queue; poll while it has nothing."""
        queue, work = self.queue, self._work
        while True:
            self._poll()
            with self.lock():
                found = queue.lease(self.rank, work.test_size, work.tests)
            if found.kind is not LeaseKind.LATER or found.stage is not stage:
                return found
            self._transport.wait_for(lambda: queue.stage is not stage or queue.has_work, POLL_SECONDS)

    def step(self, micro_batches: Iterable[Batch], lease: Lease, lr: float) -> None:
        """Step as a single worker would, on parameters that the others change meanwhile."""
        queue, compute, mean = self.queue, self._compute, 0.0
        version = -1
        for batch in micro_batches:
            if version < 0:
                version = queue.updates
            loss = compute.forward(self.model, batch, weight=batch.size / lease.size)
            compute.backward(loss)
            mean += loss.item()
        weight = compute.take_weight() or 1.0
        mean /= weight
        skip = compute.overflows(gradients_of(self.model.parameters()))
        if (divisor := weight * compute.scale) != 1.0:
            compute.divide(self.model.parameters(), divisor)
        if self._clip is not None:
            compute.clip(self.model.parameters(), self._clip, total_norm)
        optimizers.set_lr(self._optimizer, lr)
        compute.update(self._optimizer, skip=skip)
        while queue.is_full:
            self._poll()
            self._transport.wait_for(lambda: not queue.is_full, POLL_SECONDS, "room")
        with self.lock():
            queue.trained(self.rank, mean, lr, queue.updates - version)

    def tested(self, sums: EvaluationSums) -> None:
        with self.lock():
            self.queue.tested(self.rank, sums)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Rank 0 writes the shared model; each rank loads the optimizer state."""
        if self.rank == 0:
            state.unpack_model(tensors, self.model)
        state.unpack_optimizer(tensors, self._optimizer)
        self._transport.barrier()

    # ---- the owner of the queue, at rank 0

    def poll_with(self, poll: Callable[[], None]) -> None:
        self._poll = poll

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One worker of the host at a time; a change that was cut short by a kill is undone."""
        with self._transport.lock(), self.queue.changing(self.rank):
            yield

    def state(self) -> dict[str, Tensor]:
        """The shared model, and this worker's optimizer state."""
        return state.pack(self.model, self._optimizer)

    def forget(self, rank: int) -> None:
        """Keep nothing: no worker waits for another."""

    def _share_model(self) -> None:
        """Move parameters and buffers into shared memory; rank 0 writes their values."""
        shared: dict[str, Tensor] = dict(self.model.named_parameters())
        shared |= dict(self.model.named_buffers())
        views: list[tuple[ParameterSlot, Tensor]] = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in shared.values()):
            slots, length = lay_out((name, t) for name, t in sorted(shared.items()) if t.dtype == dtype)
            name = f"parameters {str(dtype).removeprefix('torch.')}"
            flat = self._transport.share(name, max(1, length) * dtype.itemsize).view(dtype)
            views += [(slot, slot.view(flat)) for slot in slots]
        with torch.no_grad():
            if self.rank == 0 and not self._joining:
                for slot, view in views:
                    view.copy_(slot.parameter)
            if not self._joining:
                self._transport.barrier()
            for slot, view in views:
                slot.parameter.data = view
