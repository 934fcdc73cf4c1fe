"""What one worker knows of its group: its rank, the hosts of all ranks, its channel to the parent.

The control channel carries small messages, never tensors: addresses, status, notices, requests to stop.
Tensors travel through a transport, which uses the channel only to find its peers.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class RankStatus(NamedTuple):
    """What a worker is doing, as it reports itself."""

    step: int = 0
    phase: str = "starting"  # of the clock
    operation: str = ""  # within the phase, if known: `barrier 2,408`
    moves: int = 0  # grows with any progress: if it stays the same, the worker is stuck


STATUS = struct.Struct("<QQ16s24s")  # of a status page: step, calls of the operation, phase, operation


ENOUGH = 0  # in place of a signal: the work is done


def ignore(*message: Any) -> None:
    """The listener that ignores all messages."""


class ControlChannel(Protocol):
    """The connection between a worker and the parent of its group."""

    def exchange(self, value: Any) -> list[Any]:
        """Return the small picklable values of all ranks, None for a rank that is gone. All must call it."""

    def tell(self, message: Any) -> None:
        """Send a message to the parent and return at once. Messages arrive in order."""

    def watch(self, status: Callable[[], RankStatus]) -> None:
        """Let this function report the status of the worker. It is called from another thread."""

    def post(self, name: str, value: Any) -> None:
        """Leave a small picklable value for workers that join later. It replaces one of the same name."""

    def joined(self) -> int:
        """Take part in exchanges from now on, as a worker that joins. Return how many there were so far."""

    @property
    def posted(self) -> dict[str, Any]:
        """What was posted before this worker joined. Empty for workers that were there from the start."""

    @property
    def gone(self) -> frozenset[int]:
        """The ranks that are gone. A replacement counts as gone until it has joined."""

    @property
    def status_slot(self) -> memoryview | None:
        """Memory for the worker's STATUS that outlives it, or None."""

    @property
    def stop(self) -> int | None:
        """The signal with which the parent asks the workers to stop after the current step, or None.

        ENOUGH asks them to end as if the work were done.
        """


class NullChannel:
    """The null channel: the worker is its own parent."""

    status_slot: memoryview | None = None
    gone: frozenset[int] = frozenset()

    def __init__(
        self, hear: Callable[[Any], None] = ignore, enough: Callable[[], bool] = lambda: False
    ) -> None:
        self._hear, self._enough = hear, enough
        self.posted: dict[str, Any] = {}

    @property
    def stop(self) -> int | None:
        return ENOUGH if self._enough() else None

    def exchange(self, value: Any) -> list[Any]:
        return [value]

    def tell(self, message: Any) -> None:
        self._hear(message)

    def watch(self, status: Callable[[], RankStatus]) -> None:
        """Do nothing: there is no parent."""

    def post(self, name: str, value: Any) -> None:
        """Do nothing: no worker joins."""

    def joined(self) -> int:
        return 0


@dataclass(frozen=True)
class RankInfo:
    """One worker's rank, the host names of all ranks, its control channel, and whether it joins later."""

    rank: int = 0
    hosts: tuple[str, ...] = field(default_factory=lambda: (socket.gethostname(),))
    channel: ControlChannel = field(default_factory=NullChannel)
    joining: bool = False  # as the replacement of a lost worker: the others are training already

    @property
    def size(self) -> int:
        """The number of ranks."""
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
        """This worker's number among the workers on its host."""
        return self.peers_on_host.index(self.rank)
