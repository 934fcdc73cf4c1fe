"""The interface of a transport: ranks, collectives, messages, shared memory; every wait has a deadline.

What an operation exchanges is counted by whoever wraps a transport, in one unit whichever it is: the bytes of
payload that this rank hands over or takes. A tensor that ranks sum or broadcast counts once at each of them,
at its own size, and what they gather at the size of all parts; a message, or a tensor handed over in shared
memory, counts at both ends. How often a library copies or forwards it on the way is no part of it, and a rank
alone exchanges nothing.
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
EXCLUSIVE = 4  # locks of a host
CPU = torch.device("cpu")
PATIENCE = (
    1800.0  # seconds a wait may last where nobody says otherwise; hangs are noticed earlier by the parent
)


class Transport(Protocol):
    """What a strategy may ask of the others. All tensors are changed in place or returned whole.

    `rank` of `size`; `peers_on_host` are the ranks with which this transport shares memory, itself included.

    A wait that outlasts the transport's deadline raises DeadlineError; a peer found dead, PeerLostError.
    A sum has the same bits at every rank, and the same tensors in the same gang have the same sum every time.
    `threads` and `shm` add the ranks in their order; the libraries under `torch` and `mpi` have orders of
    their own.
    """

    rank: int
    size: int
    peers_on_host: tuple[int, ...]

    @property
    def on_host(self) -> Transport:
        """The transport among the peers on this host: what it shares is memory."""

    @property
    def across(self) -> Transport:
        """The transport between the workers of the same number on all hosts: what it sends are messages.

        Together they span the gang: summing over `on_host` and then over `across` sums over all ranks.
        """

    @property
    def messages(self) -> Messages:
        """The transport by which any rank of the gang reaches any other with messages of one kind."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """The root's tensor at every rank, in place."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, by rank; shapes may differ."""

    def send(self, tensor: Tensor, to: int, ahead: int = 0) -> None:
        """Hand a tensor to one rank.

        So many messages may be `ahead` of their receiver: they are copied, and nobody waits for them.
        """

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """Receive into a tensor from one rank."""

    def recv_any(self, tensor: Tensor) -> int:
        """Receive into a tensor from whichever rank's message is the first, and say whose it was."""

    def barrier(self) -> None:
        """Return when every rank has come here."""

    def share(self, name: str, nbytes: int) -> Tensor:
        """Zeroed bytes, the same memory at every peer on this host; all of them must ask for it."""

    def exclusive(self, number: int = 0) -> AbstractContextManager[object]:
        """One peer on this host at a time, for each number below EXCLUSIVE; who dies inside lets others in.

        Where no memory is shared there is nothing to protect.
        """

    def until(self, ready: Callable[[], bool], seconds: float, what: Awaited = "work") -> bool:
        """Wait for something to change in shared memory, at most so long; whether it did.

        `what` is for whoever is told what this rank is waiting for.
        """

    def ring(self) -> None:
        """Something has changed in shared memory: let those look who wait for an answer or a request."""

    def copy_shared(self, tensor: Tensor, out: Tensor) -> Tensor:
        """Write a tensor into shared memory, for a peer."""

    def add_shared(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        """Sum tensors that lie in shared memory, in their order, into `out`."""

    def close(self) -> None:
        """Give everything back; closing twice is allowed."""


class Messages(Transport, Protocol):
    """A transport that can make others out of parts of itself."""

    def parts(self, groups: Sequence[tuple[int, ...]]) -> Transport:
        """The transport of this rank's group; all ranks must ask for the same groups, each in one of them."""


def inside(transport: Any, operation: str, nbytes: int, call: Callable[[Any], T]) -> T:
    """Let the innermost transport do something inside of all wrappers, who are told of so many bytes."""
    around = getattr(transport, "around", None)
    if around is None:  # the transport itself
        return call(transport)
    result: T = around(operation, nbytes, inside, transport.inner, operation, nbytes, call)
    return result


def in_place(transport: Transport, operation: InPlace, nbytes: int) -> None:
    """Tell wrappers what is handed over where it lies in shared memory: there is nothing to do."""
    inside(transport, operation, nbytes, lambda inner: None)
