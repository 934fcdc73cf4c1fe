"""Where one worker of a gang finds itself, and the thin line by which it reaches whoever looks after it.

The line carries words, never tensors: who is where, what a worker is doing, what it has to tell, that it
should stop. Tensors travel by a transport, which uses the line only to find its peers.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class RankStatus(NamedTuple):
    """What a worker is doing, as far as it says so itself."""

    step: int = 0
    phase: str = "starting"  # one of the clock's
    operation: str = ""  # within it, where there is more to say: `barrier 2,408`
    moves: int = 0  # grows whenever anything moves on: a worker whose number stands still is stuck


STATUS = struct.Struct("<QQ16s24s")  # a status for a board: step, calls of the operation, phase, operation


def ignore(*message: Any) -> None:
    """Whoever does not listen."""


class ControlChannel(Protocol):
    """From a worker to whoever looks after its gang, and back."""

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's (picklable, small) value by rank; all ranks must come here, who is gone has None."""

    def tell(self, message: Any) -> None:
        """Something for the parent to hear, in the order it was told; returns at once."""

    def watch(self, status: Callable[[], RankStatus]) -> None:
        """From now on this function (called from another thread) says what the worker is doing."""

    def post(self, name: str, value: Any) -> None:
        """Leave a (picklable, small) fact for those who join later; the latest by its name counts."""

    def joined(self) -> int:
        """A worker that joins is ready: from now on exchanges wait for it. How many there were so far."""

    @property
    def posted(self) -> dict[str, Any]:
        """What had been posted when this worker joined; nothing for those who were there from the start."""

    @property
    def gone(self) -> frozenset[int]:
        """The ranks that are known to be gone; those that come in their place are, until they have joined."""

    @property
    def board(self) -> memoryview | None:
        """Where a worker may write a NOTE that outlives it, if there is such a place."""

    @property
    def stop(self) -> int | None:
        """The signal by which the parent asks the gang to stop in good order, if it does."""


class NullChannel:
    """The null line: the worker is its own parent."""

    stop: int | None = None
    board: memoryview | None = None
    gone: frozenset[int] = frozenset()

    def __init__(self, hear: Callable[[Any], None] = ignore) -> None:
        self._hear = hear
        self.posted: dict[str, Any] = {}

    def exchange(self, value: Any) -> list[Any]:
        """Its own."""
        return [value]

    def tell(self, message: Any) -> None:
        """Heard at once."""
        self._hear(message)

    def watch(self, status: Callable[[], RankStatus]) -> None:
        """Nobody watches."""

    def post(self, name: str, value: Any) -> None:
        """Nobody joins."""

    def joined(self) -> int:
        """It was there from the start."""
        return 0


@dataclass(frozen=True)
class RankInfo:
    """One worker's rank in a gang, the host names of all its ranks, its line, and whether it came later."""

    rank: int = 0
    hosts: tuple[str, ...] = field(default_factory=lambda: (socket.gethostname(),))
    channel: ControlChannel = field(default_factory=NullChannel)
    joining: bool = False  # in the place of one that was lost: the others are at work already

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self.hosts)

    @property
    def host(self) -> str:
        """This worker's host."""
        return self.hosts[self.rank]

    @property
    def peers_on_host(self) -> tuple[int, ...]:
        """The ranks on this worker's host, itself included."""
        return tuple(rank for rank, host in enumerate(self.hosts) if host == self.host)

    @property
    def local_rank(self) -> int:
        """This worker's number among those on its host."""
        return self.peers_on_host.index(self.rank)
