"""The null transport: one worker, for whom every collective is already done."""

from __future__ import annotations

from typing import final

from torch import Tensor

from manyhands.errors import UsageError


@final
class Solo:
    """Rank 0 of 1."""

    rank = 0
    size = 1
    peers_on_host: tuple[int, ...] = (0,)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over one rank."""
        return tensor

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """What the root has, it has."""
        self._only_me(root)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """A copy, as any other transport gives."""
        return [tensor.clone()]

    def send(self, tensor: Tensor, to: int) -> None:
        """There is nobody to send to."""
        raise UsageError(f"the solo transport has one rank: nothing can be sent to rank {to}")

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """There is nobody to receive from."""
        raise UsageError(f"the solo transport has one rank: nothing can come from rank {source}")

    def barrier(self) -> None:
        """Everyone is here."""

    def close(self) -> None:
        """Nothing to give back."""

    def _only_me(self, rank: int) -> None:
        if rank != 0:
            raise UsageError(f"the solo transport has one rank: there is no rank {rank}")
