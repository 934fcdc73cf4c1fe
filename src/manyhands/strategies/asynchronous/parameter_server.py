"""A parameter server: some ranks hold the parameters and the optimizer, the others push gradients and pull.

    server 0     [ w w w w | momentum ]  owns the work queue too         server 1   [ w w w w | momentum ]
                   ^ push      | lease, pull                                          ^ push     | pull
    worker 2   lease, pull, forward, backward, push;  lease, ...         DistBelief's Downpour, A3C
    worker 3         lease, pull, forward, backward, push;  ...

An update is applied as it arrives: w <- w - lr g(w as it was `staleness` updates ago). `staleness_aware`
divides the learning rate of a gradient by its staleness (staleness.py). `bound` limits how far a worker may
get ahead of the slowest (stale-synchronous). `backup` makes synchronous rounds that do not wait for the
slowest workers: their gradients are dropped, and their samples are leased again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import final

import numpy as np
import torch
from torch import Tensor

from manyhands.core.errors import PeerLostError
from manyhands.strategies.asynchronous.base import (
    POLL_SECONDS,
    AsynchronousSetup,
    AsyncRank,
    ParameterServer,
    QueueOwner,
)
from manyhands.strategies.asynchronous.parameter_client import Client
from manyhands.strategies.asynchronous.parameter_slice import ParameterSlice
from manyhands.strategies.asynchronous.parameter_store import ParameterStore
from manyhands.strategies.asynchronous.server_channel import (
    ServerChannel,
    ServerReply,
    ServerRequest,
    Verb,
    server_channel,
)
from manyhands.strategies.asynchronous.work_queue import EvaluationSums, LeaseKind, QueueStage, WorkQueue
from manyhands.strategies.consistency import broadcast_buffers, check_same_model
from manyhands.strategies.options import ServerOptions
from manyhands.strategies.sparse_gradients import refuse


def server(setup: AsynchronousSetup) -> AsyncRank:
    """What this rank is: the first ranks serve, the others train."""
    options: ServerOptions = setup.options
    refuse(setup.model, "server")
    if not setup.joining:
        check_same_model(setup.model, setup.transport)
        broadcast_buffers(setup.model, setup.transport)
    store = ParameterStore(setup.model, options.servers)
    channel = server_channel(setup.transport, store, options.servers, setup.joining)
    if setup.transport.rank == 0:
        return QueueServer(setup, store, channel)
    if setup.transport.rank < options.servers:
        return SliceServer(setup, store, channel)
    return Client(setup, store, channel)


@final
class SliceServer(ParameterServer):
    """A server without the queue: gradients in, parameters out."""

    def __init__(self, setup: AsynchronousSetup, store: ParameterStore, channel: ServerChannel) -> None:
        self.model, self._channel = setup.model, channel
        self._slice = ParameterSlice(setup, store, channel)

    def serve(self, count: Callable[[], None]) -> None:
        """Answer until server 0 says that the run is over."""
        own, self._slice.count = self._slice, count
        while True:
            heard = self._channel.listen(POLL_SECONDS)
            if heard is None:
                continue
            rank, request = heard
            optimizer_state = None
            if request.verb is Verb.PUSH:
                own.apply(self._channel.pushed(rank), request.lr, own.version - request.version)
            elif request.verb is Verb.FETCH:
                optimizer_state = own.optimizer_state()[request.number]
            reply = ServerReply(pull=request.verb is Verb.PULL, version=own.version)
            self._channel.answer(rank, reply, optimizer_state)
            if request.verb is Verb.LEAVE:
                return

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self._slice.load_state(tensors)


@final
class QueueServer(ParameterServer, QueueOwner):
    """Server 0: it holds a slice of the parameters like the others, and leases out the work."""

    def __init__(self, setup: AsynchronousSetup, store: ParameterStore, channel: ServerChannel) -> None:
        self.model, self._work = setup.model, setup.work
        self._options: ServerOptions = setup.options
        self._store, self._channel = store, channel
        self._slice = ParameterSlice(setup, store, channel)
        ranks = setup.transport.size
        memory = np.zeros(WorkQueue.size(ranks), dtype=np.uint8)
        self.queue = WorkQueue(memory, ranks, setup.work.order, setup.work.parts)
        self._expected = set(range(self._options.servers, ranks))  # workers that have not said hello
        self._waiting: dict[int, ServerRequest] = {}  # workers that asked for a lease and have none
        self._round: dict[int, ServerRequest] = {}  # workers whose gradients wait for those of others
        self._poll: Callable[[], None] = lambda: None
        self._scales = setup.compute.scale != 1.0

    def serve(self, count: Callable[[], None]) -> None:
        """Answer until every worker knows that the run is over."""
        self._slice.count = count
        while self._expected or self.queue.present:
            heard = self._channel.listen(POLL_SECONDS)
            if heard is not None:
                self._handle(*heard)
                self._lease_out()
            if self._round and self._is_complete():
                self._close_round()
            self._poll()
            self._lease_out()
        if self.queue.stage is not QueueStage.OVER:
            raise PeerLostError("all workers are gone: no worker is left to train")
        for other in range(1, self._options.servers):
            self._channel.ask(other, ServerRequest(Verb.LEAVE))
        self._channel.close()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self._slice.load_state(tensors)

    # ---- the owner of the queue

    def poll_with(self, poll: Callable[[], None]) -> None:
        self._poll = poll

    def lock(self) -> AbstractContextManager[object]:
        """Return an empty context: no other rank has the queue."""
        return nullcontext()

    def state(self) -> dict[str, Tensor]:
        return self._slice.whole_state()

    def forget(self, rank: int) -> None:
        """Drop the requests of a worker that is gone, and do not wait for it."""
        self._expected.discard(rank)
        self._waiting.pop(rank, None)
        self._round.pop(rank, None)
        self._channel.forget(rank)

    # ---- requests

    def _handle(self, rank: int, request: ServerRequest) -> None:
        queue, own, self._waiting[rank] = self.queue, self._slice, request
        if request.verb is Verb.HELLO:
            self._expected.discard(rank)
            queue.enter(rank)
        elif request.verb is Verb.TESTED:
            queue.tested(rank, EvaluationSums(request.score, request.loss, request.weight))
        elif request.verb is Verb.FLUSH:
            own.apply(self._channel.pushed(rank), request.lr)
            queue.flushed()
        elif request.verb is Verb.TRAINED and self._options.backup is not None:
            self._take_into_round(rank, request)
        elif request.verb is Verb.TRAINED:
            staleness = -1
            if request.pushed:
                staleness = own.version - request.version
                own.apply(self._channel.pushed(rank), request.lr, staleness)
            queue.trained(rank, request.loss, request.lr, staleness, applied=request.pushed)

    def _lease_out(self) -> None:
        """Give each waiting worker a lease if there is one, or tell it that the stage has changed."""
        queue, work, bound = self.queue, self._work, self._options.bound
        if self._options.backup is not None and self._expected:
            return  # all workers take part in the first round
        for rank, request in list(self._waiting.items()):
            lease = queue.lease(rank, work.test_size, work.tests, bound)
            flush = lease.kind is not LeaseKind.TRAIN and request.holding
            if flush:
                if lease.kind is LeaseKind.TEST:
                    raise AssertionError("a test began while gradients were in flight")
            elif lease.kind is LeaseKind.LATER and lease.stage is request.stage:
                continue
            del self._waiting[rank]
            behind = request.version != self._slice.version  # may be so even right after a pull for a test
            fresh = request.pull or (behind and self._options.pull_every == 1)
            pull = (lease.kind is LeaseKind.TRAIN and fresh) or (lease.kind is LeaseKind.TEST and behind)
            self._channel.answer(rank, ServerReply(lease, pull, flush, self._slice.version))
            if lease.kind is LeaseKind.OVER:
                queue.leave(rank)

    # ---- rounds, with `backup`

    def _take_into_round(self, rank: int, request: ServerRequest) -> None:
        if request.version < self._slice.version:  # its round is over
            self.queue.put_back(rank, gone=False)
        else:
            self._round[rank] = self._waiting.pop(rank)

    def _is_complete(self) -> bool:
        """Whether the round has all gradients that it waits for, or all that can still come."""
        assert self._options.backup is not None
        wanted, queue = max(1, self.queue.present - self._options.backup), self.queue
        may_lease = queue.stage is QueueStage.TRAIN and queue.has_work
        no_more = not may_lease and queue.leased_at(self._slice.version) <= len(self._round)
        return len(self._round) >= wanted or no_more

    def _close_round(self) -> None:
        """Make one update with the mean gradient of all samples of the round (law 4)."""
        requests, queue = dict(sorted(self._round.items())), self.queue
        sizes = {rank: queue.size_of(rank) for rank in requests}
        pushed = {rank: self._channel.pushed(rank) for rank in requests}
        used = [rank for rank in requests if not self._overflowed(pushed[rank])] or list(requests)
        rows, total = [pushed[rank] for rank in used], sum(sizes[rank] for rank in used)
        flags = torch.stack([self._store.flags(row) for row in rows]).amax(dim=0)
        for rank, row in zip(used, rows, strict=True):
            row.mul_(sizes[rank] / total)
        for row in rows[1:]:
            rows[0].add_(row)
        self._store.flags(rows[0]).copy_(flags)
        first = next(iter(requests.values()))
        self._slice.apply(rows[0], first.lr)
        for number, (rank, request) in enumerate(requests.items()):
            queue.trained(rank, request.loss, request.lr, 0, applied=number == 0)
        self._waiting |= requests
        self._round.clear()

    def _overflowed(self, row: Tensor) -> bool:
        """Whether a worker has pushed nothing because its gradients were too large for float16."""
        return self._scales and not bool(self._store.flags(row).any())
