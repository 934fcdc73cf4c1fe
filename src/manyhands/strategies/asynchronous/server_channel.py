"""The channel between workers and parameter servers: requests, replies, pushed gradients, pulled parameters.

On one host everything lies in shared memory: a worker pushes a gradient by saying that it is there, and reads
parameters where they lie. Between hosts the same values travel as messages.
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
    """What a request says or asks for."""

    HELLO = 0  # a worker begins
    ASK = 1  # for a lease
    TRAINED = 2  # a piece is done; asks for a lease
    TESTED = 3  # a part of the test set is evaluated; asks for a lease
    FLUSH = 4  # pushes the gradients that the worker still held; asks for a lease
    PUSH = 5  # a gradient, for a server without the queue
    PULL = 6  # the parameters of such a server
    FETCH = 7  # server 0 asks for one kind of optimizer state
    LEAVE = 8  # server 0 says that the run is over


class ServerRequest(NamedTuple):
    """One request to a server."""

    verb: Verb
    stage: QueueStage = QueueStage.TRAIN  # the stage that the worker knows of
    pushed: bool = False  # whether a gradient comes along
    pull: bool = False  # whether the worker wants parameters with its next piece
    holding: bool = False  # whether the worker has gradients that it has not pushed
    version: int = 0  # of the parameters for which the gradient was computed
    lr: float = 0.0
    loss: float = 0.0
    score: float = 0.0
    weight: float = 0.0  # of the losses of a part of the test set
    number: int = 0  # of the kind of optimizer state to fetch

    @classmethod
    def of(cls, numbers: list[float]) -> ServerRequest:
        """From a row of numbers."""
        verb, stage, pushed, pull, holding, version, *values, number = numbers[: len(cls._fields)]
        flags = bool(pushed), bool(pull), bool(holding)
        lr, loss, score, weight = values
        told = Verb(int(verb)), QueueStage(int(stage))
        return cls(*told, *flags, int(version), lr, loss, score, weight, int(number))


class ServerReply(NamedTuple):
    """One reply of a server."""

    lease: Lease = Lease(LeaseKind.LATER)
    pull: bool = False  # whether parameters come along
    flush: bool = False  # there is nothing to do until the worker has pushed the gradients it holds
    version: int = 0

    def numbers(self) -> list[float]:
        """As a row of numbers."""
        return [float(number) for number in (*self.lease, self.pull, self.flush, self.version)]

    @classmethod
    def of(cls, numbers: list[float]) -> ServerReply:
        """From a row of numbers."""
        kind, start, size, stage, pull, flush, version = (int(number) for number in numbers[:7])
        return cls(Lease(LeaseKind(kind), start, size, QueueStage(stage)), bool(pull), bool(flush), version)


_NUMBERS = 16  # of a request or a reply
_STORE = 1  # the number of the first lock on parameters; 0 is the lock on the queue


class ServerChannel(Protocol):
    """One rank's end of the channel: a worker asks, a server listens and answers."""

    row: Tensor  # a worker's gradient, to be pushed
    values: Tensor  # a server's parameters and buffers

    def ask(self, server: int, request: ServerRequest) -> ServerReply:
        """Send a request, with this rank's row if it is pushed, and wait for the reply."""

    def pull(self, server: int, into: Tensor, reply: ServerReply) -> int:
        """Read the parameters that a server's reply announced; return their version."""

    def fetch(self, server: int, number: int) -> Tensor:
        """A server's slice of one kind of optimizer state."""

    def listen(self, seconds: float) -> tuple[int, ServerRequest] | None:
        """The next request and its rank; None if there is none for this long, where that can be known."""

    def pushed(self, rank: int) -> Tensor:
        """The row that holds a worker's gradient."""

    def change(self) -> AbstractContextManager[object]:
        """Inside, no rank reads this server's parameters."""

    def answer(self, rank: int, reply: ServerReply, optimizer_state: Tensor | None = None) -> None:
        """Reply to a rank, which waits for it."""

    def applied(self, version: int) -> None:
        """Set the version of this server's parameters."""

    def forget(self, rank: int) -> None:
        """Drop the request of a worker that is gone."""

    def close(self) -> None:
        """Stop listening: a rank that joins now is told that the run is over."""


@final
class MemoryChannel:
    """For ranks of one host: requests, replies, one row per worker and the parameters in shared memory."""

    def __init__(self, transport: Transport, store: ParameterStore, servers: int, joining: bool) -> None:
        self._transport, self._store, self._rank = transport, store, transport.rank
        ranks, behind = transport.size, aligned(store.size)
        memory = transport.share("store", (behind + store.row * ranks) * store.dtype.itemsize)
        elements = memory.view(store.dtype)
        self.values = elements[: store.size]
        self._rows = list(elements[behind:].view(ranks, store.row).unbind())
        self.row = self._rows[self._rank]
        shared = transport.share("requests", 8 * (1 + servers * (1 + ranks * (2 + 2 * _NUMBERS)))).numpy()
        self._closed, counts, texts = np.split(shared.view(np.int64), [1, 1 + servers * (1 + 2 * ranks)])
        self._versions = counts[:servers]
        self._asked, self._answered = counts[servers:].reshape(2, servers, ranks)
        self._texts = texts.view(np.float64).reshape(servers, ranks, 2, _NUMBERS)  # request and reply
        self._heard = np.zeros(ranks, dtype=np.int64)  # requests that were read, by rank
        self._last = 0
        if joining:  # the last request of the worker before this one is dropped first
            asked, answered = self._asked[:, self._rank], self._answered[:, self._rank]
            transport.wait_for(lambda: bool((asked == answered).all() or self._closed[0]), 60.0)

    def ask(self, server: int, request: ServerRequest) -> ServerReply:
        """Write the request and count it; the server sees the count. A dead server ends the run."""
        rank, asked, answered = self._rank, self._asked[server], self._answered[server]
        if request.pushed:
            in_place(self._transport, "put_shared", _pushed_bytes(self._store, server))
        self._texts[server, rank, 0, : len(request)] = request
        fence()
        asked[rank] += 1
        count = int(asked[rank])
        self._transport.notify()
        while not self._transport.wait_for(
            lambda: bool(answered[rank] == count or self._closed[0]), 1.0, "answer"
        ):
            pass
        if answered[rank] != count:  # this rank joined when the others had left already
            return ServerReply(Lease(LeaseKind.OVER, stage=QueueStage.OVER))
        fence()
        return ServerReply.of(self._texts[server, rank, 1].tolist())

    def pull(self, server: int, into: Tensor, reply: ServerReply) -> int:
        """Read the parameters where they lie, while the server does not write."""
        parts = [self._store.slice_of(server)]
        if server == 0 and self._store.buffer_elements:
            parts.append(slice(self._store.length, self._store.size))
        with self._transport.lock(_STORE + server % 3):
            for part in parts:
                self._transport.add_shared([self.values[part]], into[part])
            return int(self._versions[server])

    def fetch(self, server: int, number: int) -> Tensor:
        """The server writes it into this rank's row."""
        self.ask(server, ServerRequest(Verb.FETCH, number=number))
        return self.row[self._store.slice_of(server)].clone()

    def listen(self, seconds: float) -> tuple[int, ServerRequest] | None:
        """Take the ranks that have asked in turn."""
        asked, heard = self._asked[self._rank], self._heard
        if not self._transport.wait_for(lambda: bool((asked > heard).any()), seconds, "request"):
            return None
        fence()
        new = np.flatnonzero(asked > heard)
        later = new[new > self._last]
        self._last = rank = int(later[0] if len(later) else new[0])
        heard[rank] = asked[rank]
        request = ServerRequest.of(self._texts[self._rank, rank, 0].tolist())
        if request.pushed:
            in_place(self._transport, "read_shared", _pushed_bytes(self._store, self._rank))
        return rank, request

    def pushed(self, rank: int) -> Tensor:
        """The worker's own row, in shared memory."""
        return self._rows[rank]

    def change(self) -> AbstractContextManager[object]:
        """Hold this server's lock."""
        return self._transport.lock(_STORE + self._rank % 3)

    def answer(self, rank: int, reply: ServerReply, optimizer_state: Tensor | None = None) -> None:
        """Write the reply, and optimizer state that was fetched into the rank's row."""
        if optimizer_state is not None:
            self._rows[rank][self._store.slice_of(self._rank)].copy_(optimizer_state)
        if reply.pull:
            in_place(self._transport, "put_shared", _pulled_bytes(self._store, self._rank))
        numbers = reply.numbers()
        self._texts[self._rank, rank, 1, : len(numbers)] = numbers
        fence()
        self._answered[self._rank, rank] = self._heard[rank]
        self._transport.notify()

    def applied(self, version: int) -> None:
        """Write the version where all workers read it."""
        self._versions[self._rank] = version

    def forget(self, rank: int) -> None:
        """Mark the request as answered."""
        self._heard[rank] = self._asked[self._rank, rank]
        self._answered[self._rank, rank] = self._heard[rank]

    def close(self) -> None:
        self._closed[0] = 1
        self._transport.notify()


@final
class MessageChannel:
    """For ranks of several hosts: each has memory of its own, and everything is sent."""

    def __init__(self, transport: Transport, store: ParameterStore, servers: int) -> None:
        self._messages, self._store, self._rank, self._servers = (
            transport.messages,
            store,
            transport.rank,
            servers,
        )
        serves = self._rank < servers
        self.values = torch.zeros(store.size, dtype=store.dtype) if serves else torch.zeros(0)
        self.row = torch.zeros(store.row, dtype=store.dtype)
        self._rows: dict[int, Tensor] = {}
        self._text = torch.zeros(_NUMBERS, dtype=torch.float64)
        self._version = 0

    def ask(self, server: int, request: ServerRequest) -> ServerReply:
        """Send the request, then the gradient if it is pushed; receive the reply."""
        text = torch.zeros(_NUMBERS, dtype=torch.float64)
        text[: len(request)] = torch.tensor([float(number) for number in request], dtype=torch.float64)
        self._messages.send(text, server)
        if request.pushed:
            for part in self._pushed_parts(self.row, server):
                self._messages.send(part, server)
        self._messages.recv(self._text, server)
        return ServerReply.of(self._text.tolist())

    def pull(self, server: int, into: Tensor, reply: ServerReply) -> int:
        """Receive the parameters, which follow the reply."""
        for part in self._parameter_parts(into, server):
            self._messages.recv(part, server)
        return reply.version

    def fetch(self, server: int, number: int) -> Tensor:
        """Receive the optimizer state, which follows the reply."""
        self.ask(server, ServerRequest(Verb.FETCH, number=number))
        part = self._store.slice_of(server)
        optimizer_state = torch.empty(part.stop - part.start, dtype=self._store.dtype)
        return self._messages.recv(optimizer_state, server)

    def listen(self, seconds: float) -> tuple[int, ServerRequest] | None:
        """Receive the request that comes first."""
        rank = self._messages.recv_any(self._text)
        request = ServerRequest.of(self._text.tolist())
        if request.pushed:
            for part in self._pushed_parts(self.pushed(rank), self._rank):
                self._messages.recv(part, rank)
        return rank, request

    def pushed(self, rank: int) -> Tensor:
        """A row of this server's own memory, one for each worker."""
        if rank not in self._rows:
            self._rows[rank] = torch.zeros(self._store.row, dtype=self._store.dtype)
        return self._rows[rank]

    def change(self) -> AbstractContextManager[object]:
        """No other rank can read this server's memory."""
        return self._messages.lock()

    def answer(self, rank: int, reply: ServerReply, optimizer_state: Tensor | None = None) -> None:
        """Send the reply, then the parameters or the optimizer state."""
        text = torch.zeros(_NUMBERS, dtype=torch.float64)
        numbers = reply._replace(version=self._version).numbers()
        text[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        self._messages.send(text, rank)
        parts = self._parameter_parts(self.values, self._rank) if reply.pull else []
        for part in [*parts, *([] if optimizer_state is None else [optimizer_state])]:
            self._messages.send(part, rank)

    def applied(self, version: int) -> None:
        """Send the version with every reply."""
        self._version = version

    def forget(self, rank: int) -> None:
        """Keep nothing: messages to a rank that is gone are lost."""

    def close(self) -> None:
        """Do nothing: no rank joins a run on several hosts."""

    def _pushed_parts(self, row: Tensor, server: int) -> list[Tensor]:
        store = self._store
        end = store.length + len(store.slots) + (store.buffer_elements if server == 0 else 0)
        if self._servers == 1:
            return [row[:end]]
        return [row[store.slice_of(server)], row[store.length : end]]

    def _parameter_parts(self, values: Tensor, server: int) -> list[Tensor]:
        store = self._store
        if self._servers == 1:
            return [values[: store.size]]
        buffers = [values[store.length : store.size]] if server == 0 and store.buffer_elements else []
        return [values[store.slice_of(server)], *buffers]


def server_channel(transport: Transport, store: ParameterStore, servers: int, joining: bool) -> ServerChannel:
    """Through memory where all ranks share it, else by messages."""
    if transport.on_host.size == transport.size:
        return MemoryChannel(transport, store, servers, joining)
    return MessageChannel(transport, store, servers)


def _pushed_bytes(store: ParameterStore, server: int) -> int:
    """Bytes that a worker pushes to a server: its slice of the gradient, the flags, the buffers' changes."""
    return _pulled_bytes(store, server) + len(store.slots) * store.dtype.itemsize


def _pulled_bytes(store: ParameterStore, server: int) -> int:
    """Bytes that a worker pulls from a server: its slice of the parameters, and the buffers."""
    part = store.slice_of(server)
    elements: int = part.stop - part.start + (store.buffer_elements if server == 0 else 0)
    return elements * store.dtype.itemsize
