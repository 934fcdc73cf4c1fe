"""Workers that are threads of one process: deterministic, without files or sockets, for tests.

Every collective is one exchange: each rank puts in a value, waits for the values of all ranks, and computes
its result from the list. A group may pretend that its ranks run on several hosts.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, NoReturn, Self, TypeVar, final

import torch
from torch import Tensor

from manyhands.core.errors import PeerLostError, UsageError
from manyhands.core.rank_info import RankInfo
from manyhands.transports import rank_grid, tensor_bytes
from manyhands.transports.base import CPU, DEFAULT_TIMEOUT, LOCKS, Transport
from manyhands.transports.solo import SoloTransport
from manyhands.transports.transport_defaults import TransportDefaults
from manyhands.transports.waiting import deadline_error, peer_lost_error

T = TypeVar("T")


@final
class ThreadGroup:
    """What the ranks of one group share: exchanges, messages, locks, and the set of ranks that have ended."""

    def __init__(
        self, size: int, timeout: float = DEFAULT_TIMEOUT, hosts: Sequence[str] | None = None
    ) -> None:
        self.hosts = tuple(hosts) if hosts is not None else ("here",) * size
        self.timeout = timeout
        self.changed = threading.Condition()
        self.gone: set[int] = set()
        self.rooms: dict[tuple[tuple[int, ...], int], ThreadRoom] = {}
        self.locks = [threading.Lock() for _ in range(LOCKS)]

    def transport(self, rank: int) -> ThreadsTransport:
        """The transport of one rank."""
        return ThreadsTransport.in_room(self.room(tuple(range(len(self.hosts)))), rank)

    def run(self, function: Callable[[ThreadsTransport], T]) -> list[T]:
        """Call the function once per rank, each in its own thread, and return the results by rank.

        A rank that has returned or failed is gone, and ranks that wait for it fail. The error raised here is
        that of the lowest rank, but an error about a lost peer only if there is no other.
        """
        results: list[Any] = [None] * len(self.hosts)
        failures: dict[int, BaseException] = {}

        def work(rank: int) -> None:
            try:
                results[rank] = function(self.transport(rank))
            except BaseException as failure:  # noqa: BLE001 raised again below
                failures[rank] = failure
            finally:
                self.leave(rank)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self.hosts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[min(failures, key=lambda rank: (isinstance(failures[rank], PeerLostError), rank))]
        return results

    def room(self, ranks: tuple[int, ...], number: int = 0) -> ThreadRoom:
        """The room of these ranks. Rooms with different numbers are independent."""
        with self.changed:
            return self.rooms.setdefault((ranks, number), ThreadRoom(self, ranks))

    def leave(self, rank: int) -> None:
        """Mark a rank as gone: ranks that wait for it fail."""
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "transport threads connects threads of one process, not processes: use shm, torch or mpi"
        )


@final
class ThreadRoom:
    """Exchanges and messages of some ranks of a group. They have their own numbers from 0 on."""

    def __init__(self, group: ThreadGroup, ranks: tuple[int, ...]) -> None:
        self.group, self.ranks = group, ranks
        self.exchanges: dict[int, dict[int, Any]] = defaultdict(dict)
        self.messages: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)

    def exchange(self, number: int, rank: int, value: Any, operation: str) -> list[Any]:
        """The values of all ranks, as soon as all are there."""
        with self.group.changed:
            values = self.exchanges[number]
            values[rank] = value
            self.group.changed.notify_all()
            self.wait(lambda: [peer for peer in range(len(self.ranks)) if peer not in values], operation)
            self.exchanges.pop(number, None)  # by the first that leaves; the others hold `values`
        return [values[peer] for peer in range(len(self.ranks))]

    def wait(self, missing: Callable[[], list[int]], operation: str) -> None:
        """Wait until no rank is missing."""
        group = self.group
        end = time.monotonic() + group.timeout
        while absent := [self.ranks[peer] for peer in missing()]:
            if gone := [rank for rank in absent if rank in group.gone]:
                raise peer_lost_error(operation, gone)
            if time.monotonic() >= end:
                raise deadline_error(group.timeout, operation, absent)
            group.changed.wait(end - time.monotonic())


@final
class ThreadsTransport(TransportDefaults):
    """One rank of a group, which rank 0 creates and passes to the others."""

    def __init__(
        self, info: RankInfo, *, device: torch.device = CPU, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        made = ThreadGroup(info.size, timeout, info.hosts) if info.rank == 0 else None
        group: ThreadGroup = info.channel.exchange(made)[0]
        self._enter(group.room(tuple(range(info.size))), info.rank)

    @classmethod
    def in_room(cls, room: ThreadRoom, rank: int) -> Self:
        """The transport of one rank of a room."""
        made = cls.__new__(cls)
        made._enter(room, rank)
        return made

    def _enter(self, room: ThreadRoom, rank: int) -> None:
        self.rank, self.size = rank, len(room.ranks)
        self._room, self._calls, self._exchanges, self._splits = room, Counter[str](), 0, 0
        hosts = [room.group.hosts[member] for member in room.ranks]
        self.peers_on_host = rank_grid.group_of(rank, rank_grid.rows(hosts))
        self._column = rank_grid.group_of(rank, rank_grid.columns(hosts))

    @cached_property
    def on_host(self) -> Transport:
        """The ranks on the same pretended host."""
        return self._among(self.peers_on_host)

    @cached_property
    def across(self) -> Transport:
        """The ranks with the same local rank on each pretended host."""
        return self._among(self._column)

    def split(self, groups: Sequence[tuple[int, ...]]) -> Transport:
        """Each group has a room of its own."""
        self._splits += 1
        return self._among(rank_grid.group_of(self.rank, groups), self._splits)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Each rank sums everything, in rank order."""
        whole = tensor_bytes.flatten(tensor)
        tensor_bytes.add_in_order(self._exchange("all_reduce", whole.clone()), whole)
        return tensor_bytes.copy_back(whole, tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        values = self._exchange("broadcast", tensor.detach().clone() if self.rank == root else None)
        tensor.detach().copy_(values[root])
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [part.clone() for part in self._exchange("all_gather", tensor.detach().clone())]

    def send(self, tensor: Tensor, to: int, ahead: int = 0) -> None:
        """Queue a copy until it is received, whatever `ahead` is."""
        with self._room.group.changed:
            self._room.messages[self.rank, to].append(tensor.detach().clone())
            self._room.group.changed.notify_all()

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        operation = self._begin("recv")
        with self._room.group.changed:
            messages = self._room.messages[source, self.rank]
            self._room.wait(lambda: [] if messages else [source], operation)
            tensor.detach().copy_(messages.popleft())
        return tensor

    def recv_any(self, tensor: Tensor) -> int:
        """Receive the oldest message of the lowest rank that has sent one."""
        operation, messages = self._begin("recv_any"), self._room.messages
        with self._room.group.changed:
            others = [peer for peer in range(self.size) if peer != self.rank]

            def missing() -> list[int]:
                """The ranks that can still send one, or all others if all are gone. None if one has come."""
                if any(messages[peer, self.rank] for peer in others):
                    return []
                gone = self._room.group.gone
                return [peer for peer in others if self._room.ranks[peer] not in gone] or others

            self._room.wait(missing, operation)
            source = next(peer for peer in others if messages[peer, self.rank])
            tensor.detach().copy_(messages[source, self.rank].popleft())
        return source

    def barrier(self) -> None:
        self._exchange("barrier", None)

    def share(self, name: str, nbytes: int) -> Tensor:
        """Memory that the first rank of the host allocates and all of them use."""
        if self.on_host is not self:
            return self.on_host.share(name, nbytes)
        shared: Tensor = self._exchange("share", torch.zeros(nbytes, dtype=torch.uint8))[0]
        return shared

    def lock(self, number: int = 0) -> AbstractContextManager[object]:
        return self._room.group.locks[number]

    def close(self) -> None:
        """Mark this rank as gone."""
        if self.size == len(self._room.group.hosts):
            self._room.group.leave(self._room.ranks[self.rank])

    def _among(self, peers: tuple[int, ...], number: int = 0) -> Transport:
        if len(peers) == self.size:
            return self
        if len(peers) == 1:
            return SoloTransport()
        ranks = tuple(self._room.ranks[peer] for peer in peers)
        return ThreadsTransport.in_room(self._room.group.room(ranks, number), peers.index(self.rank))

    def _begin(self, operation: str) -> str:
        self._calls[operation] += 1
        return f"{operation} {self._calls[operation]:,}"

    def _exchange(self, operation: str, value: Any) -> list[Any]:
        self._exchanges += 1
        return self._room.exchange(self._exchanges, self.rank, value, self._begin(operation))
