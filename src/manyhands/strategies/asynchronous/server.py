"""A parameter server: some ranks hold the parameters and the optimizer, the others push gradients and pull.

    server 0     [ w w w w | momentum ]  keeps the ledger too            server 1   [ w w w w | momentum ]
                   ^ push      | claim, pull                                          ^ push     | pull
    worker 2   claim, pull, forward, backward, push;  claim, ...         DistBelief's Downpour, A3C
    worker 3         claim, pull, forward, backward, push;  ...

An update is applied as it arrives: w <- w - lr g(w as it was `staleness` updates ago). `staleness_aware`
divides the rate of a gradient by its staleness (staleness.py), `bound` lets no worker get further ahead of
the slowest (stale-synchronous), and `backup` makes synchronous rounds that do not wait for the slowest:
what these bring is dropped and their samples are claimed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import final

import numpy as np
import torch
from torch import Tensor

from manyhands.core.errors import PeerLostError
from manyhands.data.base import Batch
from manyhands.recipes import optimizers
from manyhands.strategies import state
from manyhands.strategies.asynchronous.base import LOOK, AsyncWorker
from manyhands.strategies.asynchronous.client import Client
from manyhands.strategies.asynchronous.parameter_store import ParameterStore
from manyhands.strategies.asynchronous.server_channel import (
    ServerChannel,
    ServerReply,
    ServerRequest,
    Verb,
    server_channel,
)
from manyhands.strategies.asynchronous.staleness import velocity_kept
from manyhands.strategies.asynchronous.work_queue import Lease, LeaseKind, QueueStage, WorkQueue
from manyhands.strategies.base import Setup
from manyhands.strategies.consistency import check_same_model, spread_buffers
from manyhands.strategies.options import ServerOptions
from manyhands.strategies.sparse_gradients import refuse


def server(setup: Setup) -> AsyncWorker:
    """What this rank is: the first ones serve."""
    options: ServerOptions = setup.options
    refuse(setup.model, "server")
    if not setup.joining:
        check_same_model(setup.model, setup.transport)
        spread_buffers(setup.model, setup.transport)
    store = ParameterStore(setup.model, options.servers)
    meeting = server_channel(setup.transport, store, options.servers, setup.joining)
    if setup.transport.rank < options.servers:
        return Server(setup, store, meeting)
    return Client(setup, store, meeting)


@final
class Server:
    """One rank that serves: its slice of the parameters; rank 0 hands out the work as well."""

    trains = False

    def __init__(self, setup: Setup, store: ParameterStore, meeting: ServerChannel) -> None:
        assert setup.work is not None
        self._transport, self._compute, self._work = setup.transport, setup.compute, setup.work
        self._options: ServerOptions = setup.options
        self._store, self._window = store, meeting
        self.model, self.rank = setup.model, setup.transport.rank
        if self.rank == 0 or setup.transport.on_host.size < setup.transport.size:
            store.fill(meeting.whole)
        setup.transport.barrier()
        store.bind(meeting.whole)
        self._slices = {spot.name: self._slice(*store.within(spot, self.rank)) for spot in store.spots}
        self._optimizer = optimizers.build(
            setup.recipe, self._slices.items(), optimizers.undecayed(self.model)
        )
        self._version = 0
        ranks = setup.transport.size
        memory = np.zeros(WorkQueue.size(ranks), dtype=np.uint8)
        self.queue = WorkQueue(memory, ranks, setup.work.order, setup.work.parts)
        self._expected = set(range(self._options.servers, ranks))  # who has not said hello
        self._waiting: dict[int, ServerRequest] = {}  # who asked for work and has none
        self._round: dict[int, ServerRequest] = {}  # whose gradients wait for those of others
        self._look: Callable[[], None] = lambda: None

    def lock(self) -> AbstractContextManager[object]:
        """Nobody else has it."""
        return nullcontext()

    def enter(self, look: Callable[[], None]) -> None:
        """Who looks is called between two requests."""
        self._look = look

    def serve(self, count: Callable[[], None]) -> None:
        """Answer until everybody has been sent home."""
        self._count = count
        if self.rank:
            self._serve_slice()
            return
        while self._expected or self.queue.present:
            heard = self._window.listen(LOOK)
            if heard is not None:
                self._hear(*heard)
                self._hand_out()
            if self._round and self._is_complete():
                self._close_round()
            self._look()
            self._hand_out()
        if self.queue.stage is not QueueStage.OVER:
            raise PeerLostError("all workers are gone: nobody is left to train")
        for other in range(1, self._options.servers):
            self._window.ask(other, ServerRequest(Verb.LEAVE))
        self._window.close()

    def claim(self, known: QueueStage) -> Lease:
        """A server claims nothing."""
        raise AssertionError

    def step(self, micro_batches: Iterable[Batch], claim: Lease, lr: float) -> None:
        """A server trains nothing."""
        raise AssertionError

    def tested(self, claim: Lease, score: float, loss: float) -> None:
        """A server tests nothing."""
        raise AssertionError

    # ---- server 0

    def _hear(self, rank: int, request: ServerRequest) -> None:
        queue, self._waiting[rank] = self.queue, request
        if request.verb is Verb.HELLO:
            self._expected.discard(rank)
            queue.enter(rank)
        elif request.verb is Verb.TESTED:
            queue.tested(rank, request.score, request.loss)
        elif request.verb is Verb.FLUSH:
            self._apply(request, self._window.pushed(rank))
            queue.flushed()
        elif request.verb is Verb.TRAINED and self._options.backup is not None:
            self._take_into_round(rank, request)
        elif request.verb is Verb.TRAINED:
            staleness = -1
            if request.pushed:
                staleness = self._version - request.version
                self._apply(request, self._window.pushed(rank), staleness)
            queue.trained(rank, request.loss, request.lr, staleness, applied=request.pushed)

    def _hand_out(self) -> None:
        """Whoever waits gets work where there is some, or hears that everybody is about something else."""
        queue, work, bound = self.queue, self._work, self._options.bound
        if self._options.backup is not None and self._expected:
            return  # the first round is everybody's
        for rank, request in list(self._waiting.items()):
            claim = queue.claim(rank, work.test_size, work.tests, bound)
            flush = claim.kind is not LeaseKind.TRAIN and request.holding
            if flush:
                if claim.kind is LeaseKind.TEST:
                    raise AssertionError("a test began while gradients were under way")
            elif claim.kind is LeaseKind.LATER and claim.stage is request.known:
                continue
            del self._waiting[rank]
            behind = request.version != self._version  # who has pulled for a test is not due, and yet may be
            fresh = request.pull or (behind and self._options.pull_every == 1)
            pull = (claim.kind is LeaseKind.TRAIN and fresh) or (claim.kind is LeaseKind.TEST and behind)
            self._window.answer(rank, ServerReply(claim, pull, flush, self._version))
            if claim.kind is LeaseKind.OVER:
                queue.leave(rank)

    def _take_into_round(self, rank: int, request: ServerRequest) -> None:
        if request.version < self._version:  # its round is over
            self.queue.put_back(rank, gone=False)
        else:
            self._round[rank] = self._waiting.pop(rank)

    def _is_complete(self) -> bool:
        """Whether all have come that a round waits for, or can come."""
        assert self._options.backup is not None
        wanted, queue = max(1, self.queue.present - self._options.backup), self.queue
        may_claim = queue.stage is QueueStage.TRAIN and queue.has_work
        nobody_else = not may_claim and queue.claimed_since(self._version) <= len(self._round)
        return len(self._round) >= wanted or nobody_else

    def _close_round(self) -> None:
        """One update with the mean gradient of all samples of the round (law 4)."""
        brought, queue = dict(sorted(self._round.items())), self.queue
        sizes = {rank: queue.size_of(rank) for rank in brought}
        rows, total = [self._window.pushed(rank) for rank in brought], sum(sizes.values())
        flags = torch.stack([self._store.flags(row) for row in rows]).amax(dim=0)
        for row, size in zip(rows, sizes.values(), strict=True):
            row.mul_(size / total)
        for row in rows[1:]:
            rows[0].add_(row)
        self._store.flags(rows[0]).copy_(flags)
        first = next(iter(brought.values()))
        self._apply(first, rows[0])
        for number, (rank, request) in enumerate(brought.items()):
            queue.trained(rank, request.loss, request.lr, 0, applied=number == 0)
        self._waiting |= brought
        self._round.clear()

    def forget(self, rank: int) -> None:
        """Nobody waits for it any more, and it for nothing."""
        self._expected.discard(rank)
        self._waiting.pop(rank, None)
        self._round.pop(rank, None)
        self._window.forget(rank)

    # ---- every server

    def _serve_slice(self) -> None:
        """A server without a ledger: gradients in, parameters out, until server 0 says that it is over."""
        while True:
            heard = self._window.listen(LOOK)
            if heard is None:
                continue
            rank, request = heard
            memory = None
            if request.verb is Verb.PUSH:
                self._apply(request, self._window.pushed(rank), self._version - request.version)
            elif request.verb is Verb.FETCH:
                memory = self._memory()[request.number]
            self._window.answer(
                rank, ServerReply(pull=request.verb is Verb.PULL, version=self._version), memory
            )
            if request.verb is Verb.LEAVE:
                return

    def _apply(self, request: ServerRequest, row: Tensor, staleness: int = 0) -> None:
        """One update of this server's slice."""
        store = self._store
        divisor = max(1, staleness) if self._options.staleness_aware else 1
        flags = store.flags(row).tolist()
        for spot, had in zip(store.spots, flags, strict=True):
            low, high = store.within(spot, self.rank)
            self._slices[spot.name].grad = row[low:high] if had else None
        optimizers.set_lr(self._optimizer, request.lr / divisor)
        with self._window.change(), velocity_kept(self._optimizer, divisor):
            self._compute.update(self._optimizer, forget=False)
            if self.rank == 0 and store.kept:
                for kept, change in zip(store.kept_in(self._window.whole), store.changes(row), strict=True):
                    kept.add_(change)
            self._version += 1
            self._window.applied(self._version)
        self._count()

    def _slice(self, low: int, high: int) -> Tensor:
        return self._window.whole[low:high]

    # ---- whole tensors

    def state(self) -> dict[str, Tensor]:
        """The parameters and the optimizer's memory, put together from all servers."""
        assert self.rank == 0
        if self._transport.on_host.size < self._transport.size:
            for other in range(1, self._options.servers):
                reply = self._window.ask(other, ServerRequest(Verb.PULL))
                self._window.pull(other, self._window.whole, reply)
        self._store.take_buffers(self._window.whole)
        kinds = iter(range(2**31))

        def whole(pieces: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            number, flat = next(kinds), torch.zeros(self._store.length, dtype=self._store.dtype)
            self._lay(flat, pieces)
            for other in range(1, self._options.servers):
                flat[self._store.slice_of(other)] = self._window.fetch(other, number)
            return self._store.put_together(flat, pieces)

        return state.pack(self.model, self._optimizer, whole)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Every server takes its slices, and server 0 the buffers."""
        if self.rank == 0 or self._transport.on_host.size < self._transport.size:
            state.unpack_model(tensors, self.model)
            self._store.fill(self._window.whole)
        state.unpack_optimizer(
            tensors, self._optimizer, lambda name, tensor: self._store.part(self.rank, name, tensor)
        )
        self._transport.barrier()

    def _lay(self, flat: Tensor, pieces: Mapping[str, Tensor]) -> None:
        for spot in self._store.spots:
            if spot.name in pieces:
                low, high = self._store.within(spot, self.rank)
                flat[low:high] = pieces[spot.name]

    def _memory(self) -> list[Tensor]:
        """The kinds of the optimizer's memory in the order of their names, each as a row of this slice."""
        part = self._store.slice_of(self.rank)
        rows: list[Tensor] = []
        for pieces in state.kinds(self._optimizer).values():
            flat = torch.zeros(self._store.length, dtype=self._store.dtype)
            self._lay(flat, pieces)
            rows.append(flat[part])
        return rows
