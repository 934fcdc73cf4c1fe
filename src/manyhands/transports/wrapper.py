"""Transports around transports, which count, delay or fail what passes through them (law 7).

No result changes. What is reached through `on_host` and `across` is wrapped alike, with the outer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from torch import Tensor

from manyhands.transports.base import Awaited, Transport

T = TypeVar("T")


class TransportWrapper:
    """Forwards everything; whoever wants to be there meanwhile overrides `around`."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.size, self.peers_on_host = inner.rank, inner.size, inner.peers_on_host
        self._wrapped: dict[str, Self] = {}

    def around(self, operation: str, nbytes: int, call: Callable[..., T], *arguments: Any) -> T:
        """Do one operation on so many bytes."""
        return call(*arguments)

    def again(self, inner: Transport) -> Self:
        """The same wrapper around another part of the same transport."""
        return type(self)(inner)

    def _part(self, name: str) -> Self:
        if name not in self._wrapped:
            part = getattr(self.inner, name)
            self._wrapped[name] = self if part is self.inner else self.again(part)
        return self._wrapped[name]

    @property
    def on_host(self) -> Self:
        """Wrapped alike."""
        return self._part("on_host")

    @property
    def across(self) -> Self:
        """Wrapped alike."""
        return self._part("across")

    @property
    def messages(self) -> Self:
        """Wrapped alike."""
        return self._part("messages")

    def parts(self, groups: Sequence[tuple[int, ...]]) -> Self:
        """Wrapped alike."""
        return self.again(self.around("parts", 0, self.inner.messages.parts, groups))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The inner transport's."""
        return self.around("all_reduce", tensor.nbytes, self.inner.all_reduce, tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """The inner transport's."""
        return self.around("broadcast", tensor.nbytes, self.inner.broadcast, tensor, root)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The inner transport's; the bytes are those of all ranks, taken as alike."""
        return self.around("all_gather", tensor.nbytes * self.size, self.inner.all_gather, tensor)

    def send(self, tensor: Tensor, to: int, ahead: int = 0) -> None:
        """The inner transport's."""
        self.around("send", tensor.nbytes, self.inner.send, tensor, to, ahead)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """The inner transport's."""
        return self.around("recv", tensor.nbytes, self.inner.recv, tensor, source)

    def recv_any(self, tensor: Tensor) -> int:
        """The inner transport's."""
        return self.around("recv_any", tensor.nbytes, self.inner.recv_any, tensor)

    def barrier(self) -> None:
        """The inner transport's."""
        self.around("barrier", 0, self.inner.barrier)

    def share(self, name: str, nbytes: int) -> Tensor:
        """The inner transport's; nothing moves yet."""
        return self.around("share", 0, self.inner.share, name, nbytes)

    @contextmanager
    def exclusive(self, number: int = 0) -> Iterator[None]:
        """The inner transport's; what is counted is the way in."""
        inside = self.inner.exclusive(number)
        self.around("lock", 0, inside.__enter__)
        try:
            yield
        finally:
            inside.__exit__(None, None, None)

    def until(self, ready: Callable[[], bool], seconds: float, what: Awaited = "work") -> bool:
        """The inner transport's."""
        return self.around(what, 0, self.inner.until, ready, seconds, what)

    def ring(self) -> None:
        """The inner transport's."""
        self.inner.ring()

    def copy_shared(self, tensor: Tensor, out: Tensor) -> Tensor:
        """The inner transport's."""
        return self.around("copy_shared", tensor.nbytes, self.inner.copy_shared, tensor, out)

    def add_shared(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        """The inner transport's; what this rank has then."""
        return self.around("add_shared", out.nbytes, self.inner.add_shared, parts, out)

    def close(self) -> None:
        """The inner transport's."""
        self.inner.close()

    def __getattr__(self, name: str) -> Any:
        """What only some transports have: a `process_group`."""
        if name == "inner":  # not there yet: asking it would ask for itself
            raise AttributeError(name)
        return getattr(self.inner, name)
