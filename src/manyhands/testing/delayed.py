"""A transport that takes as long as a slower network."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar, final

from manyhands.transports.base import Transport
from manyhands.transports.wrapper import TransportWrapper

T = TypeVar("T")


@final
class DelayedTransport(TransportWrapper):
    """A network with `latency` seconds per message and `bandwidth` bytes per second, and ring collectives."""

    def __init__(self, inner: Transport, latency: float, bandwidth: float | None = None) -> None:
        super().__init__(inner)
        self._latency, self._bandwidth = latency, bandwidth

    def rewrap(self, inner: Transport) -> Self:
        return type(self)(inner, self._latency, self._bandwidth)

    def around(self, operation: str, nbytes: int, call: Callable[..., T], *arguments: Any) -> T:
        """Sleep for the time on the network, then call."""
        messages, share = _ring(operation, self.size)
        delay = messages * self._latency
        if self._bandwidth is not None:
            delay += share * nbytes / self._bandwidth
        if delay > 0:
            time.sleep(delay)
        return call(*arguments)


def _ring(operation: str, size: int) -> tuple[int, float]:
    """The number of consecutive messages, and the share of the bytes that one rank sends."""
    steps = size - 1
    costs = {
        "all_reduce": (2 * steps, 2 * steps / size),
        "all_gather": (steps, steps / size),
        "broadcast": (math.ceil(math.log2(size)), 1.0 if steps else 0.0),
        "barrier": (math.ceil(math.log2(size)), 0.0),
        "send": (1, 1.0),
    }
    return costs.get(operation, (0, 0.0))  # shared memory is free, and the sender pays for a message
