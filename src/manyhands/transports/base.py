"""The interface of a transport: collectives, messages and shared memory. Every wait has a timeout.

A transport can be wrapped to count what it exchanges. The unit is the same for every transport: the bytes
of payload that this rank sends or receives. A tensor that ranks sum or broadcast counts once at each rank,
at its own size. What they gather counts at the size of all parts. A message counts at both ends, and so does
a tensor that one rank leaves in shared memory for another. How often a library copies or forwards the bytes
on the way does not matter. A rank that is alone exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Awaited = Literal["work", "answer", "request", "room", "activation", "gradient"]
InPlace = Literal["put_shared", "read_shared"]
LOCKS = 4  # locks per host
CPU = torch.device("cpu")
DEFAULT_TIMEOUT = 1800.0  # seconds that one wait may last; the parent notices hangs much earlier


class Ranked(Protocol):
    """Rank `rank` of `size` ranks."""

    rank: int
    size: int


class Collectives(Ranked, Protocol):
    """Operations in which all ranks take part. Tensors are changed in place or returned whole.

    A sum has the same bits at every rank, and the same tensors in the same group have the same sum every
    time. `threads` and `shm` add the tensors in rank order. The libraries under `torch` and `mpi` have orders
    of their own.
    """

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Copy the root's tensor to every rank, in place."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by rank. Shapes may differ."""

    def barrier(self) -> None:
        """Return when every rank has called it."""


class Messages(Ranked, Protocol):
    """Tensors from one rank to another."""

    def send(self, tensor: Tensor, to: int, ahead: int = 0) -> None:
        """Send a tensor to one rank.

        Up to `ahead` messages may be in flight to that rank: they are copied, and the sender does not wait.
        """

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """Receive into a tensor from one rank."""


class SharedMemory(Protocol):
    """Memory that the ranks of one host share, locks for it, and waiting for it to change.

    `peers_on_host` are the ranks that share memory with this one, itself included.
    """

    peers_on_host: tuple[int, ...]

    def share(self, name: str, nbytes: int) -> Tensor:
        """Return zeroed bytes that all peers on this host share. All of them must call it."""

    def lock(self, number: int = 0) -> AbstractContextManager[object]:
        """Lock number 0 to LOCKS - 1 of this host. It is released when its holder dies.

        Without shared memory there is nothing to protect, and the lock does nothing.
        """

    def wait_for(self, ready: Callable[[], bool], seconds: float, what: Awaited = "work") -> bool:
        """Wait at most `seconds` until `ready()` is true, and return whether it is.

        `what` says what this rank waits for: it is shown when the worker hangs.
        """

    def notify(self) -> None:
        """Wake the peers that wait for an answer or a request: something has changed in shared memory."""

    def copy_shared(self, tensor: Tensor, out: Tensor) -> Tensor:
        """Copy a tensor into shared memory, for a peer."""

    def add_shared(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        """Sum tensors in shared memory, in this order, into `out`."""


class Transport(Collectives, Messages, SharedMemory, Protocol):
    """All that a strategy may use to exchange tensors with other workers.

    A wait that takes longer than the transport's timeout raises DeadlineError. A peer that has died raises
    PeerLostError.
    """

    @property
    def on_host(self) -> Transport:
        """The transport among the peers on this host, through shared memory."""

    @property
    def across(self) -> Transport:
        """The transport among the workers that have the same local rank on all hosts, through messages.

        Together they span the group: summing over `on_host` and then over `across` sums over all ranks.
        """

    @property
    def messages(self) -> MessageTransport:
        """The transport among all ranks that sends every message the same way, on this host or to another."""

    def close(self) -> None:
        """Release all resources. Closing twice is allowed."""


class MessageTransport(Transport, Protocol):
    """A transport whose messages all travel the same way."""

    def recv_any(self, tensor: Tensor) -> int:
        """Receive the first message of any rank into a tensor, and return that rank."""

    def split(self, groups: Sequence[tuple[int, ...]]) -> Transport:
        """Return the transport of this rank's group.

        All ranks must call it with the same groups. Each rank is in exactly one of them.
        """


def inside(transport: Any, operation: str, nbytes: int, call: Callable[[Any], T]) -> T:
    """Call a function with the innermost transport, and report it to all wrappers as one operation."""
    around = getattr(transport, "around", None)
    if around is None:  # not a wrapper
        return call(transport)
    result: T = around(operation, nbytes, inside, transport.inner, operation, nbytes, call)
    return result


def in_place(transport: SharedMemory, operation: InPlace, nbytes: int) -> None:
    """Report to wrappers that a tensor is used where it lies in shared memory, without a copy."""
    inside(transport, operation, nbytes, lambda inner: None)
