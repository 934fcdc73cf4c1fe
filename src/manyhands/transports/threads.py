"""Workers that are threads of one process: deterministic, without files or sockets, for tests.

Every collective is one meeting: each rank brings a value, waits until all have, and works out its result
from the list by itself. A group may pretend that its ranks live on several hosts.
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
from manyhands.transports.base import CPU, EXCLUSIVE, PATIENCE, Awaited, Transport
from manyhands.transports.solo import SoloTransport
from manyhands.transports.waiting import late, lost, poll

T = TypeVar("T")


@final
class ThreadGroup:
    """What the ranks of one group have in common: where they meet, their letters, and who has gone."""

    def __init__(self, size: int, timeout: float = PATIENCE, hosts: Sequence[str] | None = None) -> None:
        self.hosts = tuple(hosts) if hosts is not None else ("here",) * size
        self.timeout = timeout
        self.changed = threading.Condition()
        self.gone: set[int] = set()
        self.rooms: dict[tuple[tuple[int, ...], int], ThreadRoom] = {}
        self.locks = [threading.Lock() for _ in range(EXCLUSIVE)]

    def transport(self, rank: int) -> ThreadsTransport:
        """The transport of one rank."""
        return ThreadsTransport.inside(self.room(tuple(range(len(self.hosts)))), rank)

    def run(self, function: Callable[[ThreadsTransport], T]) -> list[T]:
        """Call the function once a rank, each in its thread, and return the results by rank.

        A rank that has returned or failed is gone: whoever waits for it then fails. The failure raised here
        is the first one by rank that is not itself about a rank that is gone.
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
        """Where these ranks meet; in rooms of other numbers they meet for something else."""
        with self.changed:
            return self.rooms.setdefault((ranks, number), ThreadRoom(self, ranks))

    def leave(self, rank: int) -> None:
        """From now on nobody waits for this rank."""
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "transport threads joins threads of one process, not processes: use shm, torch or mpi"
        )


@final
class ThreadRoom:
    """Meetings and letters of some ranks of a group, who are numbered anew in here."""

    def __init__(self, group: ThreadGroup, ranks: tuple[int, ...]) -> None:
        self.group, self.ranks = group, ranks
        self.meetings: dict[int, dict[int, Any]] = defaultdict(dict)
        self.letters: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)

    def meet(self, number: int, rank: int, value: Any, doing: str) -> list[Any]:
        """Everybody's value, when all have brought theirs."""
        with self.group.changed:
            meeting = self.meetings[number]
            meeting[rank] = value
            self.group.changed.notify_all()
            self.wait(lambda: [peer for peer in range(len(self.ranks)) if peer not in meeting], doing)
            self.meetings.pop(number, None)  # the first to leave; the others hold it already
        return [meeting[peer] for peer in range(len(self.ranks))]

    def wait(self, missing: Callable[[], list[int]], doing: str) -> None:
        """Until nobody is missing."""
        group = self.group
        end = time.monotonic() + group.timeout
        while absent := [self.ranks[peer] for peer in missing()]:
            if gone := [rank for rank in absent if rank in group.gone]:
                raise lost(doing, gone)
            if time.monotonic() >= end:
                raise late(group.timeout, doing, absent)
            group.changed.wait(end - time.monotonic())


@final
class ThreadsTransport:
    """One rank of a group; by its place, that of the group which rank 0 makes and hands around."""

    rank: int
    size: int
    peers_on_host: tuple[int, ...]

    def __init__(self, info: RankInfo, *, device: torch.device = CPU, timeout: float = PATIENCE) -> None:
        made = ThreadGroup(info.size, timeout, info.hosts) if info.rank == 0 else None
        group: ThreadGroup = info.channel.exchange(made)[0]
        self._enter(group.room(tuple(range(info.size))), info.rank)

    @classmethod
    def inside(cls, room: ThreadRoom, rank: int) -> Self:
        """The transport of one rank among those who meet in a room."""
        made = cls.__new__(cls)
        made._enter(room, rank)
        return made

    def _enter(self, room: ThreadRoom, rank: int) -> None:
        self.rank, self.size = rank, len(room.ranks)
        self._room, self._calls, self._meetings, self._parts = room, Counter[str](), 0, 0
        hosts = [room.group.hosts[member] for member in room.ranks]
        self.peers_on_host = rank_grid.line_of(rank, rank_grid.rows(hosts))
        self._column = rank_grid.line_of(rank, rank_grid.columns(hosts))

    @cached_property
    def on_host(self) -> Transport:
        """The ranks on the same pretended host."""
        return self._among(self.peers_on_host)

    @cached_property
    def across(self) -> Transport:
        """The ranks of the same number on each pretended host."""
        return self._among(self._column)

    @property
    def messages(self) -> ThreadsTransport:
        """Itself."""
        return self

    def parts(self, groups: Sequence[tuple[int, ...]]) -> Transport:
        """In a room of their own each."""
        self._parts += 1
        return self._among(rank_grid.line_of(self.rank, groups), self._parts)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Each rank sums everything, in rank order."""
        whole = tensor_bytes.row(tensor)
        tensor_bytes.add_in_order(self._meet("all_reduce", whole.clone()), whole)
        return tensor_bytes.back(whole, tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Everyone brings something, the root's is taken."""
        brought = self._meet("broadcast", tensor.detach().clone() if self.rank == root else None)
        tensor.detach().copy_(brought[root])
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Copies of what everyone brought."""
        return [part.clone() for part in self._meet("all_gather", tensor.detach().clone())]

    def send(self, tensor: Tensor, to: int, ahead: int = 0) -> None:
        """A letter that waits until it is fetched."""
        with self._room.group.changed:
            self._room.letters[self.rank, to].append(tensor.detach().clone())
            self._room.group.changed.notify_all()

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """The oldest letter from there."""
        doing = self._begin("recv")
        with self._room.group.changed:
            letters = self._room.letters[source, self.rank]
            self._room.wait(lambda: [] if letters else [source], doing)
            tensor.detach().copy_(letters.popleft())
        return tensor

    def recv_any(self, tensor: Tensor) -> int:
        """The oldest letter of the lowest rank that has written."""
        doing, letters = self._begin("recv_any"), self._room.letters
        with self._room.group.changed:
            others = [peer for peer in range(self.size) if peer != self.rank]

            def missing() -> list[int]:
                """Nobody once there is a letter; as long as some can still write, not those who are gone."""
                if any(letters[peer, self.rank] for peer in others):
                    return []
                gone = self._room.group.gone
                return [peer for peer in others if self._room.ranks[peer] not in gone] or others

            self._room.wait(missing, doing)
            source = next(peer for peer in others if letters[peer, self.rank])
            tensor.detach().copy_(letters[source, self.rank].popleft())
        return source

    def barrier(self) -> None:
        """A meeting to which nothing is brought."""
        self._meet("barrier", None)

    def share(self, name: str, nbytes: int) -> Tensor:
        """What the first rank of the host makes, all of them use."""
        if self.on_host is not self:
            return self.on_host.share(name, nbytes)
        shared: Tensor = self._meet("share", torch.zeros(nbytes, dtype=torch.uint8))[0]
        return shared

    def exclusive(self, number: int = 0) -> AbstractContextManager[object]:
        """A lock of the group."""
        return self._room.group.locks[number]

    def until(self, ready: Callable[[], bool], seconds: float, what: Awaited = "work") -> bool:
        """By looking again and again."""
        return poll(ready, seconds)

    def ring(self) -> None:
        """Who waits looks by itself."""

    def copy_shared(self, tensor: Tensor, out: Tensor) -> Tensor:
        """A copy."""
        return out.copy_(tensor)

    def add_shared(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        """Summed where they lie."""
        return tensor_bytes.add_in_order(parts, out)

    def close(self) -> None:
        """Whoever still waits for this rank learns that it is gone."""
        if self.size == len(self._room.group.hosts):
            self._room.group.leave(self._room.ranks[self.rank])

    def _among(self, peers: tuple[int, ...], number: int = 0) -> Transport:
        if len(peers) == self.size:
            return self
        if len(peers) == 1:
            return SoloTransport()
        ranks = tuple(self._room.ranks[peer] for peer in peers)
        return ThreadsTransport.inside(self._room.group.room(ranks, number), peers.index(self.rank))

    def _begin(self, operation: str) -> str:
        self._calls[operation] += 1
        return f"{operation} {self._calls[operation]:,}"

    def _meet(self, operation: str, value: Any) -> list[Any]:
        self._meetings += 1
        return self._room.meet(self._meetings, self.rank, value, self._begin(operation))
