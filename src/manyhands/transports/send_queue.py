"""Sends in flight: how many a rank may have before it waits, and the buffers that they read from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar, final

from torch import Tensor

from manyhands.transports import tensor_bytes

R = TypeVar("R")  # a request of the library: something that can be waited for

EAGER_BYTES = (
    2**18
)  # up to this size a send does not wait for its receiver, whatever the library's own limit is
MAX_EAGER = 4  # eager sends in flight to one rank


@final
class SendQueue(Generic[R]):
    """The sends of one rank that may not have ended, by destination, oldest first."""

    def __init__(self) -> None:
        self._in_flight: dict[int, deque[tuple[R, Tensor]]] = {}

    def add(self, to: int, request: R, buffer: Tensor) -> None:
        """Keep the buffer until the request has ended."""
        self._in_flight.setdefault(to, deque()).append((request, buffer))

    def excess(self, to: int, limit: int) -> Iterator[R]:
        """Remove the oldest requests beyond the limit, one by one. The caller must wait for each."""
        requests = self._in_flight.get(to, deque())
        while len(requests) > limit:
            request, buffer = requests.popleft()
            yield request
            del buffer  # not before the request has ended

    def by_destination(self) -> list[list[R]]:
        """All requests that are in flight."""
        return [[request for request, _ in requests] for requests in self._in_flight.values()]

    def clear(self) -> None:
        """Forget all requests and their buffers."""
        self._in_flight.clear()


def buffer_for(tensor: Tensor, ahead: int) -> tuple[Tensor, int]:
    """A row of the CPU to send a tensor from, and how many sends may stay in flight after it.

    Where the sender will not wait, the row is a copy: it may change the tensor at once.
    """
    row = tensor_bytes.flatten(tensor)
    limit = max(ahead, MAX_EAGER if row.nbytes <= EAGER_BYTES else 0)
    if limit and row.data_ptr() == tensor.data_ptr():
        row = row.clone()
    return row, limit
