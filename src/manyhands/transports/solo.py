"""The null transport: one worker, for whom every collective is already done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import Tensor

from manyhands.core.errors import UsageError
from manyhands.core.rank_info import RankInfo
from manyhands.transports import tensor_bytes
from manyhands.transports.base import CPU, PATIENCE, Awaited
from manyhands.transports.waiting import poll


@final
class SoloTransport:
    """Rank 0 of 1."""

    rank = 0
    size = 1
    peers_on_host: tuple[int, ...] = (0,)

    def __init__(
        self, info: RankInfo | None = None, *, device: torch.device = CPU, timeout: float = PATIENCE
    ) -> None:
        if info is not None and info.size != 1:
            raise UsageError(f"the solo transport has one rank, and there are {info.size} workers")

    @property
    def on_host(self) -> SoloTransport:
        """Itself."""
        return self

    @property
    def across(self) -> SoloTransport:
        """Itself."""
        return self

    @property
    def messages(self) -> SoloTransport:
        """Itself."""
        return self

    def parts(self, groups: Sequence[tuple[int, ...]]) -> SoloTransport:
        """There is one."""
        return self

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over one rank."""
        return tensor

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """What the root has, it has."""
        if root != 0:
            raise UsageError(f"the solo transport has one rank: there is no rank {root}")
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """A copy, as any other transport gives."""
        return [tensor.detach().clone()]

    def send(self, tensor: Tensor, to: int, ahead: int = 0) -> None:
        """There is nobody to send to."""
        raise UsageError(f"the solo transport has one rank: nothing can be sent to rank {to}")

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """There is nobody to receive from."""
        raise UsageError(f"the solo transport has one rank: nothing can come from rank {source}")

    def recv_any(self, tensor: Tensor) -> int:
        """There is nobody to receive from."""
        raise UsageError("the solo transport has one rank: nothing can come from another")

    def barrier(self) -> None:
        """Everyone is here."""

    def share(self, name: str, nbytes: int) -> Tensor:
        """Memory of its own: nobody else asks for it."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def exclusive(self, number: int = 0) -> AbstractContextManager[object]:
        """Nobody else is there."""
        return nullcontext()

    def until(self, ready: Callable[[], bool], seconds: float, what: Awaited = "work") -> bool:
        """By looking again and again."""
        return poll(ready, seconds)

    def ring(self) -> None:
        """Who waits looks by itself."""

    def copy_shared(self, tensor: Tensor, out: Tensor) -> Tensor:
        """A copy."""
        return out.copy_(tensor)

    def add_shared(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        """The sum in their order."""
        return tensor_bytes.add_in_order(parts, out)

    def close(self) -> None:
        """Nothing to give back."""
