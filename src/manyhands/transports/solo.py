"""The null transport: one worker, for which every collective is already done."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Self, final

import torch
from torch import Tensor

from manyhands.core.errors import UsageError
from manyhands.core.rank_info import RankInfo
from manyhands.transports.base import CPU, DEFAULT_TIMEOUT
from manyhands.transports.transport_defaults import TransportDefaults


@final
class SoloTransport(TransportDefaults):
    """Rank 0 of 1. It can only send messages to itself."""

    rank = 0
    size = 1
    peers_on_host: tuple[int, ...] = (0,)

    def __init__(
        self, info: RankInfo | None = None, *, device: torch.device = CPU, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        if info is not None and info.size != 1:
            raise UsageError(f"the solo transport has one rank, but there are {info.size} workers")
        self._sent: deque[Tensor] = deque()

    @property
    def on_host(self) -> Self:
        return self

    def split(self, groups: Sequence[tuple[int, ...]]) -> Self:
        return self

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        _check(root)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.detach().clone()]

    def barrier(self) -> None:
        """Return at once."""

    def send(self, tensor: Tensor, to: int, ahead: int = 0) -> None:
        _check(to)
        self._sent.append(tensor.detach().clone())

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        _check(source)
        self.recv_any(tensor)
        return tensor

    def recv_any(self, tensor: Tensor) -> int:
        if not self._sent:
            raise UsageError("the solo transport has one rank: it would wait forever for a message")
        tensor.detach().copy_(self._sent.popleft())
        return 0

    def close(self) -> None:
        """Return at once: there is nothing to release."""


def _check(rank: int) -> None:
    if rank != 0:
        raise UsageError(f"the solo transport has one rank: there is no rank {rank}")
