"""A worker of a parameter server: claims, pulls, computes a gradient on a copy of its own, pushes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import Tensor

from manyhands.data.base import Batch
from manyhands.strategies.asynchronous.parameter_store import ParameterStore
from manyhands.strategies.asynchronous.server_channel import ServerChannel, ServerReply, ServerRequest, Verb
from manyhands.strategies.asynchronous.work_queue import Lease, QueueStage, WorkQueue
from manyhands.strategies.base import Setup
from manyhands.strategies.flat_layout import catch, laid
from manyhands.strategies.options import ServerOptions


@final
class Client:
    """One worker: its own copy of the parameters, and a row for its gradient.

    Where it pushes or pulls only every few steps it goes on from its own copy meanwhile, w <- w - lr g, and
    pushes the sum of its gradients (DistBelief, algorithm 7.1).
    """

    trains = True
    queue: WorkQueue  # the server's alone

    def __init__(self, setup: Setup, store: ParameterStore, meeting: ServerChannel) -> None:
        self._options: ServerOptions = setup.options
        self._compute, self._clip = setup.compute, setup.recipe.clip
        self._transport, self._store, self._window = setup.transport, store, meeting
        self.model = setup.model
        device = next(iter(store.named.values())).device
        self._local = torch.zeros(store.whole, dtype=store.dtype, device=device)
        store.fill(self._local)
        store.bind(self._local)
        # every step's gradient goes straight to where it is handed over, unless several are summed there
        self._sums = self._options.push_every > 1 or self._options.pull_every > 1
        self._fresh = torch.zeros_like(meeting.row) if self._sums else meeting.row
        self._touched = [False] * len(store.spots)
        self._gradients = [laid(self._fresh, spot) for spot in store.spots]
        for number, spot in enumerate(store.spots):
            catch(store.named[spot.name], self._gradients[number], self._touched, number)
        self._before = [buffer.clone() for buffer in store.buffers]
        self._versions = [0] * self._options.servers
        self._since_pull = self._since_push = 0
        self._due = True  # whether the next piece wants fresh parameters
        self._report = ServerRequest(Verb.HELLO)
        if not setup.joining:
            setup.transport.barrier()

    def lock(self) -> AbstractContextManager[object]:
        """There is nothing to lock."""
        return nullcontext()

    def enter(self, look: Callable[[], None]) -> None:
        """The first question is a hello."""
        self._report = ServerRequest(Verb.HELLO)

    def claim(self, known: QueueStage) -> Lease:
        """Tell server 0 what was done, and ask for more; fresh parameters may come along."""
        holding = self._since_push > 0
        asked = self._report._replace(known=known, pull=self._due, holding=holding, version=self._versions[0])
        reply = self._window.ask(0, asked)
        self._report = ServerRequest(Verb.ASK)
        if reply.flush:
            self._push(self._lr)
            self._report = ServerRequest(Verb.FLUSH, pushed=True, lr=self._lr)
            return self.claim(known)
        if reply.pull:
            self._pull(reply)
        return reply.claim

    def step(self, micro_batches: Iterable[Batch], claim: Lease, lr: float) -> None:
        """The piece's mean gradient, into the row; it is handed over with the next question."""
        compute, mean = self._compute, 0.0
        self._touched[:] = [False] * len(self._touched)
        for batch in micro_batches:
            loss = compute.forward(self.model, batch, weight=batch.size / claim.size)
            compute.backward(loss)
            mean += loss.item()
        if self._clip is not None:
            compute.clip(self._with_gradients(), self._clip)
        self._since_pull += 1
        self._since_push += 1
        self._lr = lr
        flags = torch.tensor(self._touched, dtype=self._store.dtype)
        if self._sums:
            self._go_on_alone(lr, flags)
        else:
            self._store.flags(self._window.row).copy_(flags)
        pushes = self._since_push >= self._options.push_every
        self._due = self._since_pull >= self._options.pull_every
        if pushes:
            self._push(lr)
        self._report = ServerRequest(Verb.TRAINED, pushed=pushes, lr=lr, loss=mean)

    def tested(self, claim: Lease, score: float, loss: float) -> None:
        """Told with the next question."""
        self._report = ServerRequest(Verb.TESTED, score=score, loss=loss)

    def forget(self, rank: int) -> None:
        """Nobody waits for anybody."""

    def serve(self, count: Callable[[], None]) -> None:
        """A worker serves nobody."""
        raise AssertionError

    def state(self) -> dict[str, Tensor]:
        """Only server 0 is asked."""
        raise AssertionError

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The servers take it; a worker pulls."""
        self._transport.barrier()

    def _push(self, lr: float) -> None:
        """The row is complete; it is handed to server 0 with the next question, to the others now."""
        changes = self._store.changes(self._window.row)
        for change, buffer, before in zip(changes, self._store.buffers, self._before, strict=True):
            change.copy_(buffer - before)
            before.copy_(buffer)
        for server in range(1, self._options.servers):
            asked = ServerRequest(Verb.PUSH, pushed=True, version=self._versions[server], lr=lr)
            self._window.ask(server, asked)
        self._since_push = 0

    def _pull(self, reply: ServerReply) -> None:
        self._versions[0] = self._window.pull(0, self._local, reply)
        for server in range(1, self._options.servers):
            slices = self._window.ask(server, ServerRequest(Verb.PULL))
            self._versions[server] = self._window.pull(server, self._local, slices)
        self._store.take_buffers(self._local)
        for buffer, before in zip(self._store.buffers, self._before, strict=True):
            before.copy_(buffer)
        self._since_pull, self._due = 0, False

    def _go_on_alone(self, lr: float, flags: Tensor) -> None:
        """Add this step's gradient to what is pushed later, and take the step on the copy."""
        store, row, fresh = self._store, self._window.row, self._fresh
        for gradient, touched in zip(self._gradients, self._touched, strict=True):
            if not touched:
                gradient.zero_()
        sums, had = row[: store.length], store.flags(row)
        if self._since_push == 1:
            sums.copy_(fresh[: store.length])
            had.copy_(flags)
        else:
            sums.add_(fresh[: store.length])
            torch.maximum(had, flags, out=had)
        self._local[: store.length].sub_(fresh[: store.length].to(self._local.device), alpha=lr)

    def _with_gradients(self) -> list[Tensor]:
        """Something for each parameter that has a gradient to hold it."""
        held = []
        for gradient, touched in zip(self._gradients, self._touched, strict=True):
            if touched:
                holder = torch.empty_like(gradient)
                holder.grad = gradient
                held.append(holder)
        return held
