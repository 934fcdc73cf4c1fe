"""Where workers and servers meet: one asks, the other answers; gradients go there, parameters come back.

On one host everything lies in shared memory: a gradient is handed over by saying that it is there, and
parameters are read where they lie. Between hosts the same words and numbers travel as messages.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import IntEnum
from typing import NamedTuple, Protocol, final

import numpy as np
import torch
from torch import Tensor

from manyhands.strategies.asynchronous.parameter_store import ParameterStore
from manyhands.strategies.asynchronous.work_queue import Lease, LeaseKind, QueueStage
from manyhands.strategies.flat_layout import aligned
from manyhands.transports.base import Transport, in_place
from manyhands.transports.waiting import fence


class Verb(IntEnum):
    """What a worker says."""

    HELLO = 0  # it begins
    ASK = 1  # for work
    TRAINED = 2  # a piece, and asks
    TESTED = 3  # a part of the test set, and asks
    FLUSH = 4  # the gradients that it still held, and asks
    PUSH = 5  # a gradient, for a server that keeps no ledger
    PULL = 6  # the parameters of such a server
    FETCH = 7  # server 0 wants a kind of the optimizer's memory
    LEAVE = 8  # server 0 says that it is over


class ServerRequest(NamedTuple):
    """One question to a server."""

    verb: Verb
    known: QueueStage = QueueStage.TRAIN  # what the worker thinks everybody is about
    pushed: bool = False  # whether a gradient comes along
    pull: bool = False  # whether it wants parameters with its next piece
    holding: bool = False  # whether it has gradients that it has not pushed
    version: int = 0  # of the parameters that the gradient is of
    lr: float = 0.0
    loss: float = 0.0
    score: float = 0.0
    number: int = 0  # of the kind of memory to fetch

    @classmethod
    def of(cls, numbers: list[float]) -> ServerRequest:
        """From a row of numbers."""
        verb, known, pushed, pull, holding, version, lr, loss, score, number = numbers[: len(cls._fields)]
        flags = bool(pushed), bool(pull), bool(holding)
        return cls(
            Verb(int(verb)), QueueStage(int(known)), *flags, int(version), lr, loss, score, int(number)
        )


class ServerReply(NamedTuple):
    """One answer."""

    claim: Lease = Lease(LeaseKind.LATER)
    pull: bool = False  # whether parameters come along
    flush: bool = False  # there is nothing to do until the worker has pushed what it holds
    version: int = 0

    def numbers(self) -> list[float]:
        """As a row of numbers."""
        return [float(number) for number in (*self.claim, self.pull, self.flush, self.version)]

    @classmethod
    def of(cls, numbers: list[float]) -> ServerReply:
        """From a row of numbers."""
        kind, start, size, stage, pull, flush, version = (int(number) for number in numbers[:7])
        return cls(Lease(LeaseKind(kind), start, size, QueueStage(stage)), bool(pull), bool(flush), version)


_NUMBERS = 16  # of a request or a reply
_STORE = 1  # the number of the first lock on parameters; 0 is the ledger's


class ServerChannel(Protocol):
    """One rank's side of it: a worker asks, a server listens and answers."""

    row: Tensor  # a worker's gradient, to be pushed
    whole: Tensor  # a server's parameters and buffers

    def ask(self, server: int, request: ServerRequest) -> ServerReply:
        """Say something, with this rank's row where it is pushed, and wait for the answer."""

    def pull(self, server: int, into: Tensor, reply: ServerReply) -> int:
        """The parameters of a server that were announced by its answer; returns their version."""

    def fetch(self, server: int, number: int) -> Tensor:
        """A kind of the memory of a server's optimizer, its slice of it."""

    def listen(self, seconds: float) -> tuple[int, ServerRequest] | None:
        """The next that asks; None where nobody does for so long, if that can be known."""

    def pushed(self, rank: int) -> Tensor:
        """The row in which a worker's gradient came."""

    def change(self) -> AbstractContextManager[object]:
        """Inside, this server's parameters are read by nobody."""

    def answer(self, rank: int, reply: ServerReply, memory: Tensor | None = None) -> None:
        """Let a rank go on."""

    def applied(self, version: int) -> None:
        """This server's parameters are of this version now."""

    def forget(self, rank: int) -> None:
        """A worker is gone: what it asked needs no answer."""

    def close(self) -> None:
        """Nobody listens any more: who joins now and asks hears that it is over."""


@final
class MemoryChannel:
    """Ranks of one host: slots for words, a row a worker, and the parameters, all in shared memory."""

    def __init__(self, transport: Transport, store: ParameterStore, servers: int, joining: bool) -> None:
        self._transport, self._store, self._rank = transport, store, transport.rank
        ranks, behind = transport.size, aligned(store.whole)
        memory = transport.share("store", (behind + store.row * ranks) * store.dtype.itemsize)
        numbers = memory.view(store.dtype)
        self.whole = numbers[: store.whole]
        self._rows = list(numbers[behind:].view(ranks, store.row).unbind())
        self.row = self._rows[self._rank]
        words = transport.share("words", 8 * (1 + servers * (1 + ranks * (2 + 2 * _NUMBERS)))).numpy()
        self._closed, counts, said = np.split(words.view(np.int64), [1, 1 + servers * (1 + 2 * ranks)])
        self._versions = counts[:servers]
        self._asked, self._answered = counts[servers:].reshape(2, servers, ranks)
        self._said = said.view(np.float64).reshape(servers, ranks, 2, _NUMBERS)
        self._seen = np.zeros(ranks, dtype=np.int64)
        self._last = 0
        if joining:  # what the worker before it asked last is forgotten first
            asked, answered = self._asked[:, self._rank], self._answered[:, self._rank]
            transport.wait_for(lambda: bool((asked == answered).all() or self._closed[0]), 60.0)

    def ask(self, server: int, request: ServerRequest) -> ServerReply:
        """Into the slot; the server sees the count go up, and whoever looks after the gang if it is gone."""
        rank, asked, answered = self._rank, self._asked[server], self._answered[server]
        if request.pushed:
            in_place(self._transport, "put_shared", _pushed(self._store, server))
        self._said[server, rank, 0, : len(request)] = request
        fence()
        asked[rank] += 1
        count = int(asked[rank])
        self._transport.notify()
        while not self._transport.wait_for(
            lambda: bool(answered[rank] == count or self._closed[0]), 1.0, "answer"
        ):
            pass
        if answered[rank] != count:  # it joined when the others had left already
            return ServerReply(Lease(LeaseKind.OVER, stage=QueueStage.OVER))
        fence()
        return ServerReply.of(self._said[server, rank, 1].tolist())

    def pull(self, server: int, into: Tensor, reply: ServerReply) -> int:
        """Read where they lie, while the server does not write."""
        parts = [self._store.slice_of(server)]
        if server == 0 and self._store.kept:
            parts.append(slice(self._store.length, self._store.whole))
        with self._transport.lock(_STORE + server % 3):
            for part in parts:
                self._transport.add_shared([self.whole[part]], into[part])
            return int(self._versions[server])

    def fetch(self, server: int, number: int) -> Tensor:
        """The server lays it into this rank's row."""
        self.ask(server, ServerRequest(Verb.FETCH, number=number))
        return self.row[self._store.slice_of(server)].clone()

    def listen(self, seconds: float) -> tuple[int, ServerRequest] | None:
        """Whoever has asked, in turn."""
        asked, seen = self._asked[self._rank], self._seen
        if not self._transport.wait_for(lambda: bool((asked > seen).any()), seconds, "request"):
            return None
        fence()
        new = np.flatnonzero(asked > seen)
        later = new[new > self._last]
        self._last = rank = int(later[0] if len(later) else new[0])
        seen[rank] = asked[rank]
        request = ServerRequest.of(self._said[self._rank, rank, 0].tolist())
        if request.pushed:
            in_place(self._transport, "read_shared", _pushed(self._store, self._rank))
        return rank, request

    def pushed(self, rank: int) -> Tensor:
        """The worker's row, as it lies."""
        return self._rows[rank]

    def change(self) -> AbstractContextManager[object]:
        """A lock of this server's."""
        return self._transport.lock(_STORE + self._rank % 3)

    def answer(self, rank: int, reply: ServerReply, memory: Tensor | None = None) -> None:
        """Into the slot, and what was fetched into the row."""
        if memory is not None:
            self._rows[rank][self._store.slice_of(self._rank)].copy_(memory)
        if reply.pull:
            in_place(self._transport, "put_shared", _pulled(self._store, self._rank))
        numbers = reply.numbers()
        self._said[self._rank, rank, 1, : len(numbers)] = numbers
        fence()
        self._answered[self._rank, rank] = self._seen[rank]
        self._transport.notify()

    def applied(self, version: int) -> None:
        """For all to see."""
        self._versions[self._rank] = version

    def forget(self, rank: int) -> None:
        """As if it had been answered."""
        self._seen[rank] = self._asked[self._rank, rank]
        self._answered[self._rank, rank] = self._seen[rank]

    def close(self) -> None:
        """For all to see."""
        self._closed[0] = 1
        self._transport.notify()


@final
class MessageChannel:
    """Ranks of several hosts: each has memory of its own, and what is said is sent."""

    def __init__(self, transport: Transport, store: ParameterStore, servers: int) -> None:
        self._messages, self._store, self._rank, self._servers = (
            transport.messages,
            store,
            transport.rank,
            servers,
        )
        serves = self._rank < servers
        self.whole = torch.zeros(store.whole, dtype=store.dtype) if serves else torch.zeros(0)
        self.row = torch.zeros(store.row, dtype=store.dtype)
        self._rows: dict[int, Tensor] = {}
        self._words = torch.zeros(_NUMBERS, dtype=torch.float64)
        self._version = 0

    def ask(self, server: int, request: ServerRequest) -> ServerReply:
        """Words, then numbers, then the answer's words."""
        words = torch.zeros(_NUMBERS, dtype=torch.float64)
        words[: len(request)] = torch.tensor([float(number) for number in request], dtype=torch.float64)
        self._messages.send(words, server)
        if request.pushed:
            for part in self._pushed_parts(self.row, server):
                self._messages.send(part, server)
        self._messages.recv(self._words, server)
        return ServerReply.of(self._words.tolist())

    def pull(self, server: int, into: Tensor, reply: ServerReply) -> int:
        """What follows the answer."""
        for part in self._parameter_parts(into, server):
            self._messages.recv(part, server)
        return reply.version

    def fetch(self, server: int, number: int) -> Tensor:
        """What follows the answer."""
        self.ask(server, ServerRequest(Verb.FETCH, number=number))
        part = self._store.slice_of(server)
        memory = torch.empty(part.stop - part.start, dtype=self._store.dtype)
        return self._messages.recv(memory, server)

    def listen(self, seconds: float) -> tuple[int, ServerRequest] | None:
        """Whose words come first."""
        rank = self._messages.recv_any(self._words)
        request = ServerRequest.of(self._words.tolist())
        if request.pushed:
            for part in self._pushed_parts(self.pushed(rank), self._rank):
                self._messages.recv(part, rank)
        return rank, request

    def pushed(self, rank: int) -> Tensor:
        """A row of this server's own, for each worker."""
        if rank not in self._rows:
            self._rows[rank] = torch.zeros(self._store.row, dtype=self._store.dtype)
        return self._rows[rank]

    def change(self) -> AbstractContextManager[object]:
        """Nobody else can read them."""
        return self._messages.lock()

    def answer(self, rank: int, reply: ServerReply, memory: Tensor | None = None) -> None:
        """Words, then the parameters or what was fetched."""
        words = torch.zeros(_NUMBERS, dtype=torch.float64)
        numbers = reply._replace(version=self._version).numbers()
        words[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        self._messages.send(words, rank)
        parts = self._parameter_parts(self.whole, self._rank) if reply.pull else []
        for part in [*parts, *([] if memory is None else [memory])]:
            self._messages.send(part, rank)

    def applied(self, version: int) -> None:
        """Told with every answer."""
        self._version = version

    def forget(self, rank: int) -> None:
        """Messages to the dead are lost."""

    def close(self) -> None:
        """Nobody joins."""

    def _pushed_parts(self, row: Tensor, server: int) -> list[Tensor]:
        store = self._store
        tail = store.length + len(store.spots) + (store.kept if server == 0 else 0)
        if self._servers == 1:
            return [row[:tail]]
        return [row[store.slice_of(server)], row[store.length : tail]]

    def _parameter_parts(self, whole: Tensor, server: int) -> list[Tensor]:
        store = self._store
        if self._servers == 1:
            return [whole[: store.whole]]
        kept = [whole[store.length : store.whole]] if server == 0 and store.kept else []
        return [whole[store.slice_of(server)], *kept]


def server_channel(transport: Transport, store: ParameterStore, servers: int, joining: bool) -> ServerChannel:
    """Through memory where all ranks share it, else by messages."""
    if transport.on_host.size == transport.size:
        return MemoryChannel(transport, store, servers, joining)
    return MessageChannel(transport, store, servers)


def _pushed(store: ParameterStore, server: int) -> int:
    """Bytes that a worker hands to a server: its slice of the gradient, which ones there are, the buffers."""
    part = store.slice_of(server)
    numbers: int = part.stop - part.start + len(store.spots) + (store.kept if server == 0 else 0)
    return numbers * store.dtype.itemsize


def _pulled(store: ParameterStore, server: int) -> int:
    """Bytes that a server hands to a worker: its slice of the parameters, the buffers."""
    part = store.slice_of(server)
    numbers: int = part.stop - part.start + (store.kept if server == 0 else 0)
    return numbers * store.dtype.itemsize
