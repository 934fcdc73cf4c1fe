"""A worker of a parameter server: leases, pulls, computes a gradient on its own copy, pushes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

import torch
from torch import Tensor

from manyhands.data.base import Batch
from manyhands.strategies.asynchronous.base import AsynchronousSetup, AsyncWorker
from manyhands.strategies.asynchronous.parameter_store import ParameterStore
from manyhands.strategies.asynchronous.server_channel import ServerChannel, ServerReply, ServerRequest, Verb
from manyhands.strategies.asynchronous.work_queue import EvaluationSums, Lease, QueueStage
from manyhands.strategies.base import gradients_of
from manyhands.strategies.flat_layout import redirect_gradient
from manyhands.strategies.options import ServerOptions


@final
class Client(AsyncWorker):
    """One worker: its own copy of the parameters, and a row for its gradient.

    Where it pushes or pulls only every few steps, it continues from its own copy meanwhile, w <- w - lr g,
    and pushes the sum of its gradients (DistBelief, algorithm 7.1).
    """

    def __init__(self, setup: AsynchronousSetup, store: ParameterStore, channel: ServerChannel) -> None:
        self._options: ServerOptions = setup.options
        self._compute, self._clip = setup.compute, setup.recipe.clip
        self._transport, self._store, self._channel = setup.transport, store, channel
        self.model = setup.model
        device = next(iter(store.named.values())).device
        self._local = torch.zeros(store.size, dtype=store.dtype, device=device)
        store.fill(self._local)
        store.bind(self._local)
        # each gradient goes straight into the row that is pushed, unless several are summed there
        self._sums = self._options.push_every > 1 or self._options.pull_every > 1
        self._fresh = torch.zeros_like(channel.row) if self._sums else channel.row
        self._touched = [False] * len(store.slots)
        self._gradients = [slot.view(self._fresh) for slot in store.slots]
        for number, slot in enumerate(store.slots):
            redirect_gradient(store.named[slot.name], self._gradients[number], self._touched, number)
        self._before = [buffer.clone() for buffer in store.buffers]
        self._versions = [0] * self._options.servers
        self._since_pull = self._since_push = 0
        self._due = True  # whether the next piece wants fresh parameters
        self._report = ServerRequest(Verb.HELLO)  # sent when the next lease is asked for
        if not setup.joining:
            setup.transport.barrier()

    def enter(self) -> None:
        """Say hello with the first request."""
        self._report = ServerRequest(Verb.HELLO)

    def lease(self, stage: QueueStage) -> Lease:
        """Report to server 0 what was done, and ask for more; fresh parameters may come with the reply."""
        holding = self._since_push > 0
        request = self._report._replace(
            stage=stage, pull=self._due, holding=holding, version=self._versions[0]
        )
        reply = self._channel.ask(0, request)
        self._report = ServerRequest(Verb.ASK)
        if reply.flush:
            self._push(self._lr)
            self._report = ServerRequest(Verb.FLUSH, pushed=True, lr=self._lr)
            return self.lease(stage)
        if reply.pull:
            self._pull(reply)
        return reply.lease

    def step(self, micro_batches: Iterable[Batch], lease: Lease, lr: float) -> None:
        """Compute the piece's mean gradient into the row, which is pushed with the next request."""
        compute, mean = self._compute, 0.0
        self._touched[:] = [False] * len(self._touched)
        for batch in micro_batches:
            loss = compute.forward(self.model, batch, weight=batch.size / lease.size)
            compute.backward(loss)
            mean += loss.item()
        skip = compute.overflows(gradients_of(self._with_gradients()))
        if skip:  # then it is as if no parameter had a gradient
            self._touched[:] = [False] * len(self._touched)
        for gradient, touched in zip(self._gradients, self._touched, strict=True):
            if not touched:  # it has the gradient of an earlier step, which a sum or a round would add again
                gradient.zero_()
        weight = compute.take_weight() or 1.0
        mean /= weight
        if (divisor := weight * compute.scale) != 1.0:
            compute.divide(self._with_gradients(), divisor)
        compute.stepped(skipped=skip)
        if self._clip is not None:
            compute.clip(self._with_gradients(), self._clip)
        self._since_pull += 1
        self._since_push += 1
        self._lr = lr
        flags = torch.tensor(self._touched, dtype=self._store.dtype)
        if self._sums:
            self._step_locally(lr, flags)
        else:
            self._store.flags(self._channel.row).copy_(flags)
        pushes = self._since_push >= self._options.push_every
        self._due = self._since_pull >= self._options.pull_every
        if pushes:
            self._push(lr)
        self._report = ServerRequest(Verb.TRAINED, pushed=pushes, lr=lr, loss=mean)

    def tested(self, sums: EvaluationSums) -> None:
        """Report the sums with the next request."""
        self._report = ServerRequest(Verb.TESTED, **sums._asdict())

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Wait until the servers have loaded the state; a worker pulls it."""
        self._transport.barrier()

    def _push(self, lr: float) -> None:
        """Complete the row. It goes to server 0 with the next request, and to the other servers now."""
        changes = self._store.buffer_changes(self._channel.row)
        for change, buffer, before in zip(changes, self._store.buffers, self._before, strict=True):
            change.copy_(buffer - before)
            before.copy_(buffer)
        for server in range(1, self._options.servers):
            request = ServerRequest(Verb.PUSH, pushed=True, version=self._versions[server], lr=lr)
            self._channel.ask(server, request)
        self._since_push = 0

    def _pull(self, reply: ServerReply) -> None:
        self._versions[0] = self._channel.pull(0, self._local, reply)
        for server in range(1, self._options.servers):
            other = self._channel.ask(server, ServerRequest(Verb.PULL))
            self._versions[server] = self._channel.pull(server, self._local, other)
        changes = [now - before for now, before in zip(self._store.buffers, self._before, strict=True)]
        self._store.load_buffers(self._local)
        for buffer, before, change in zip(self._store.buffers, self._before, changes, strict=True):
            before.copy_(buffer)
            if self._since_push:  # its steps since the last push are not in what it pulled
                buffer.add_(change)
        self._since_pull, self._due = 0, False

    def _step_locally(self, lr: float, flags: Tensor) -> None:
        """Add this step's gradient to the row that is pushed later, and take the step on the own copy."""
        store, row, fresh = self._store, self._channel.row, self._fresh
        sums, had_gradient = row[: store.length], store.flags(row)
        if self._since_push == 1:
            sums.copy_(fresh[: store.length])
            had_gradient.copy_(flags)
        else:
            sums.add_(fresh[: store.length])
            torch.maximum(had_gradient, flags, out=had_gradient)
        self._local[: store.length].sub_(fresh[: store.length].to(self._local.device), alpha=lr)

    def _with_gradients(self) -> list[Tensor]:
        """One tensor per gradient of this step, with the gradient as `.grad`."""
        held = []
        for gradient, touched in zip(self._gradients, self._touched, strict=True):
            if touched:
                holder = torch.empty_like(gradient)
                holder.grad = gradient
                held.append(holder)
        return held
