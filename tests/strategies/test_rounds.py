"""A parameter server and its requests, one after the other: rounds, sync points, and a late joiner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.data.order import Order
from manyhands.recipes.members import constant
from manyhands.strategies import options
from manyhands.strategies.asynchronous.base import AsynchronousSetup, Work
from manyhands.strategies.asynchronous.parameter_server import QueueServer
from manyhands.strategies.asynchronous.parameter_store import ParameterStore
from manyhands.strategies.asynchronous.server_channel import MemoryChannel, ServerReply, ServerRequest, Verb
from manyhands.strategies.asynchronous.work_queue import LeaseKind, QueueStage
from manyhands.strategies.base import Compute
from manyhands.transports.base import Transport
from manyhands.transports.threads import ThreadGroup


class Over(Exception):  # noqa: N818
    """All requests have been made."""


class ListedRequests:
    """A channel that brings the requests of a list and keeps the replies, by rank."""

    def __init__(self, store: ParameterStore, requests: Sequence[tuple[int, ServerRequest]]) -> None:
        self.values, self._requests = torch.zeros(store.size, dtype=store.dtype), list(requests)
        self._rows = {rank: torch.ones(store.row, dtype=store.dtype) for rank, _ in requests}
        self.answers: list[tuple[int, ServerReply]] = []

    def listen(self, seconds: float) -> tuple[int, ServerRequest]:
        if not self._requests:
            raise Over
        return self._requests.pop(0)

    def answer(self, rank: int, reply: ServerReply, optimizer_state: Tensor | None = None) -> None:
        self.answers.append((rank, reply))

    def pushed(self, rank: int) -> Tensor:
        return self._rows[rank]

    def change(self) -> AbstractContextManager[object]:
        return nullcontext()

    def applied(self, version: int) -> None: ...


def serve(
    requests: Sequence[tuple[int, ServerRequest]], samples: int, sync_point: int, tests: int = 1, **given: Any
) -> tuple[Any, QueueServer]:
    """A server of two workers, batches of four samples, and a test at the sync point."""
    model = nn.Linear(1, 1)
    alone = SimpleNamespace(rank=0, size=3, on_host=SimpleNamespace(size=3), barrier=lambda: None)
    chosen, store = options.build("server", given), ParameterStore(model, 1)
    work = Work(Order(samples, 4, 0), 2, tests, 1)
    channel: Any = ListedRequests(store, requests)
    setup = AsynchronousSetup(
        model=model,
        recipe=constant(lr=0.1),
        compute=Compute(nn.functional.mse_loss),
        transport=alone,  # type: ignore[arg-type]
        options=chosen,
        work=work,
    )
    server = QueueServer(setup, store, channel)
    queue = server.queue

    def poll() -> None:
        if queue.is_drained(tests):
            queue.test() if queue.stage is QueueStage.TRAIN else queue.train(samples)

    server.poll_with(poll)
    queue.begin(0, 0)
    queue.train(sync_point)
    with suppress(Over):
        server.serve(lambda: None)
    return channel.answers, server


HELLO = ServerRequest(Verb.HELLO, pull=True)


def has_tested(version: int) -> ServerRequest:
    return ServerRequest(Verb.TESTED, version=version)


def back_from_the_test(version: int) -> ServerRequest:
    """The worker knows of a test, but no part of it was left."""
    return ServerRequest(Verb.ASK, stage=QueueStage.TEST, version=version)


def has_trained(version: int) -> ServerRequest:
    return ServerRequest(Verb.TRAINED, pushed=True, pull=True, version=version, lr=0.1)


ROUND = [(1, has_trained(0)), (2, has_trained(0))]  # after which a test begins: worker 1 makes it
AT_THE_TEST = [(1, HELLO), (2, HELLO), *ROUND]


def kinds(answers: list[tuple[int, ServerReply]]) -> list[tuple[int, LeaseKind]]:
    return [(rank, reply.lease.kind) for rank, reply in answers]


def test_a_round_waits_for_a_worker_that_comes_back_later_from_a_test() -> None:
    """Worker 1 once made the first round after a test alone, and worker 2's gradient was dropped as late."""
    first = [*AT_THE_TEST, (1, has_tested(1)), (1, back_from_the_test(1)), (1, has_trained(1))]
    answers, server = serve(first, 8, 4, backup=0)
    assert kinds(answers) == [
        (1, LeaseKind.TRAIN),
        (2, LeaseKind.TRAIN),
        (1, LeaseKind.TEST),
        (2, LeaseKind.LATER),
        (1, LeaseKind.LATER),
        (1, LeaseKind.TRAIN),
    ]
    assert server._slice.version == 1  # the other half of the batch is still to come
    then = [(2, back_from_the_test(1)), (2, has_trained(1))]
    _, server = serve([*first, *then], 8, 4, backup=0)
    assert server._slice.version == 2
    assert [share[2] for share in server.queue.shares()] == [0, 0, 0]


def test_a_round_does_not_wait_for_what_no_worker_can_lease() -> None:
    """The last batch is one sample, for one of two workers."""
    requests = [(1, HELLO), (2, HELLO), (1, has_trained(0)), (2, has_trained(0)), (1, has_trained(1))]
    _, server = serve(requests, 5, 5, backup=0)
    assert server._slice.version == 2
    assert server.queue.samples == 5


def test_a_worker_that_pulled_for_a_test_pulls_again_if_others_were_faster() -> None:
    """Or it would begin with a gradient that is stale already, or comes too late for its round."""
    requests = [(1, HELLO), (2, HELLO), (1, has_trained(0)), (2, has_trained(0))]  # both are given a test
    requests += [(2, has_tested(2)), (1, has_tested(2)), (1, back_from_the_test(2)), (1, has_trained(2))]
    answers, _ = serve([*requests, (2, back_from_the_test(2))], 12, 4, tests=2)
    expected = [
        (1, LeaseKind.TEST),
        (2, LeaseKind.TEST),
        (2, LeaseKind.LATER),
        (1, LeaseKind.LATER),
        (1, LeaseKind.TRAIN),
    ]
    assert kinds(answers)[2:7] == expected
    assert [reply.pull for _, reply in answers[2:7]] == [True, True, False, False, False]
    rank, reply = answers[-1]
    assert (rank, reply.lease.kind, reply.pull, reply.version) == (2, LeaseKind.TRAIN, True, 3)


def closed(transport: Transport, made: Callable[[], nn.Module]) -> LeaseKind | None:
    channel = MemoryChannel(transport, ParameterStore(made(), 1), 1, joining=False)
    if transport.rank == 0:
        channel.close()
        return None
    return channel.ask(0, HELLO).lease.kind


def test_a_worker_that_joins_when_all_have_left_is_told_that_it_is_over() -> None:
    """It once waited for an answer for ever, and the others for it in their last exchange."""
    assert ThreadGroup(2, timeout=10).run(partial(closed, made=lambda: nn.Linear(1, 1))) == [
        None,
        LeaseKind.OVER,
    ]
