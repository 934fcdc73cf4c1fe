"""Defaults of a transport: one kind of message, and memory that is not shared with any other rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import torch
from torch import Tensor

from manyhands.transports import tensor_bytes
from manyhands.transports.base import Awaited, MessageTransport, Transport
from manyhands.transports.waiting import poll


class TransportDefaults(MessageTransport):
    """The base class of transports. Collectives, messages, `split` and `close` are left to them."""

    @property
    def on_host(self) -> Transport:
        """One rank per host."""
        from manyhands.transports.solo import SoloTransport  # which has these defaults itself

        return SoloTransport()

    @property
    def across(self) -> Transport:
        """All ranks."""
        return self

    @property
    def messages(self) -> Self:
        """All messages of this transport travel the same way."""
        return self

    def share(self, name: str, nbytes: int) -> Tensor:
        """Private memory."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def lock(self, number: int = 0) -> AbstractContextManager[object]:
        """Nothing is shared, so nothing is locked."""
        return nullcontext()

    def wait_for(self, ready: Callable[[], bool], seconds: float, what: Awaited = "work") -> bool:
        """Poll."""
        return poll(ready, seconds)

    def notify(self) -> None:
        """Do nothing: ranks that wait poll."""

    def copy_shared(self, tensor: Tensor, out: Tensor) -> Tensor:
        return out.copy_(tensor)

    def add_shared(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        return tensor_bytes.add_in_order(parts, out)
