"""A server and what it is asked, one word after the other: rounds, fences, and who comes when it is over."""

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
from manyhands.strategies.asynchronous.base import Work
from manyhands.strategies.asynchronous.parameter_server import Server
from manyhands.strategies.asynchronous.parameter_store import ParameterStore
from manyhands.strategies.asynchronous.server_channel import MemoryChannel, ServerReply, ServerRequest, Verb
from manyhands.strategies.asynchronous.work_queue import LeaseKind, QueueStage
from manyhands.strategies.base import Compute, Setup
from manyhands.transports.base import Transport
from manyhands.transports.threads import ThreadGroup


class Over(Exception):  # noqa: N818
    """All words have been said."""


class Said:
    """A window through which comes what a list says; what is answered is kept, by rank."""

    def __init__(self, store: ParameterStore, words: Sequence[tuple[int, ServerRequest]]) -> None:
        self.whole, self._words = torch.zeros(store.whole, dtype=store.dtype), list(words)
        self._rows = {rank: torch.ones(store.row, dtype=store.dtype) for rank, _ in words}
        self.answers: list[tuple[int, ServerReply]] = []

    def listen(self, seconds: float) -> tuple[int, ServerRequest]:
        if not self._words:
            raise Over
        return self._words.pop(0)

    def answer(self, rank: int, reply: ServerReply, memory: Tensor | None = None) -> None:
        self.answers.append((rank, reply))

    def pushed(self, rank: int) -> Tensor:
        return self._rows[rank]

    def change(self) -> AbstractContextManager[object]:
        return nullcontext()

    def applied(self, version: int) -> None: ...


def serve(
    words: Sequence[tuple[int, ServerRequest]], samples: int, fence: int, tests: int = 1, **given: Any
) -> tuple[Any, Server]:
    """A server of two workers, batches of four samples, and a test at the fence."""
    model = nn.Linear(1, 1)
    alone = SimpleNamespace(rank=0, size=3, on_host=SimpleNamespace(size=3), barrier=lambda: None)
    chosen, store = options.build("server", given), ParameterStore(model, 1)
    work = Work(Order(samples, 4, 0), 2, tests, 1)
    compute = Compute(nn.functional.mse_loss)
    window: Any = Said(store, words)
    setup = Setup(model, constant(lr=0.1), compute, alone, options=chosen, work=work)  # type: ignore[arg-type]
    server = Server(setup, store, window)
    queue = server.queue

    def look() -> None:
        if queue.is_drained(tests):
            queue.test() if queue.stage is QueueStage.TRAIN else queue.train(samples)

    server.enter(look)
    queue.begin(0, 0)
    queue.train(fence)
    with suppress(Over):
        server.serve(lambda: None)
    return window.answers, server


HELLO = ServerRequest(Verb.HELLO, pull=True)


def has_tested(version: int) -> ServerRequest:
    return ServerRequest(Verb.TESTED, version=version)


def back_from_the_test(version: int) -> ServerRequest:
    """It has heard that all are about a test, of which nothing was left for it."""
    return ServerRequest(Verb.ASK, known=QueueStage.TEST, version=version)


def has_trained(version: int) -> ServerRequest:
    return ServerRequest(Verb.TRAINED, pushed=True, pull=True, version=version, lr=0.1)


ROUND = [(1, has_trained(0)), (2, has_trained(0))]  # after which a test begins: worker 1 makes it
AT_THE_TEST = [(1, HELLO), (2, HELLO), *ROUND]


def kinds(answers: list[tuple[int, ServerReply]]) -> list[tuple[int, LeaseKind]]:
    return [(rank, reply.claim.kind) for rank, reply in answers]


def test_a_round_waits_for_one_that_comes_back_later_from_a_test() -> None:
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
    assert server._version == 1  # the other half of the batch is still to come
    then = [(2, back_from_the_test(1)), (2, has_trained(1))]
    _, server = serve([*first, *then], 8, 4, backup=0)
    assert server._version == 2
    assert [share[2] for share in server.queue.shares()] == [0, 0, 0]


def test_a_round_does_not_wait_for_what_nobody_can_claim() -> None:
    """The last batch is one sample, for one of two workers."""
    words = [(1, HELLO), (2, HELLO), (1, has_trained(0)), (2, has_trained(0)), (1, has_trained(1))]
    _, server = serve(words, 5, 5, backup=0)
    assert server._version == 2
    assert server.queue.samples == 5


def test_who_has_pulled_for_a_test_pulls_again_if_others_were_faster() -> None:
    """Or it would begin with a gradient that is stale already, or comes too late for its round."""
    words = [(1, HELLO), (2, HELLO), (1, has_trained(0)), (2, has_trained(0))]  # both are given a test
    words += [(2, has_tested(2)), (1, has_tested(2)), (1, back_from_the_test(2)), (1, has_trained(2))]
    answers, _ = serve([*words, (2, back_from_the_test(2))], 12, 4, tests=2)
    said = [
        (1, LeaseKind.TEST),
        (2, LeaseKind.TEST),
        (2, LeaseKind.LATER),
        (1, LeaseKind.LATER),
        (1, LeaseKind.TRAIN),
    ]
    assert kinds(answers)[2:7] == said
    assert [reply.pull for _, reply in answers[2:7]] == [True, True, False, False, False]
    rank, reply = answers[-1]
    assert (rank, reply.claim.kind, reply.pull, reply.version) == (2, LeaseKind.TRAIN, True, 3)


def closed(transport: Transport, made: Callable[[], nn.Module]) -> LeaseKind | None:
    window = MemoryChannel(transport, ParameterStore(made(), 1), 1, joining=False)
    if transport.rank == 0:
        window.close()
        return None
    return window.ask(0, HELLO).claim.kind


def test_who_joins_when_all_have_left_is_sent_home() -> None:
    """It once waited for an answer for ever, and the others for it in their last exchange."""
    assert ThreadGroup(2, timeout=10).run(partial(closed, made=lambda: nn.Linear(1, 1))) == [
        None,
        LeaseKind.OVER,
    ]
