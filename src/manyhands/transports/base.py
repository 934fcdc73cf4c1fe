"""The interface of a transport: ranks, collectives and messages, every wait with a deadline."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Transport(Protocol):
    """What a strategy may ask of the others. All tensors are changed in place or returned whole.

    `rank` of `size`; `peers_on_host` lists the ranks that share this worker's memory, itself included.
    """

    rank: int
    size: int
    peers_on_host: tuple[int, ...]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """The root's tensor at every rank, in place."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, by rank; shapes may differ."""

    def send(self, tensor: Tensor, to: int) -> None:
        """Hand a tensor to one rank."""

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """Receive into a tensor from one rank."""

    def barrier(self) -> None:
        """Return when every rank has come here."""

    def close(self) -> None:
        """Give everything back; closing twice is allowed."""
