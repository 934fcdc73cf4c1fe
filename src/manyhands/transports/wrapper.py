"""The base class of transports around transports, which count, delay or fail operations (law 7).

No result changes. `on_host`, `across` and `messages` are wrapped in the same way and share the state of the
outer wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from torch import Tensor

from manyhands.transports.base import Awaited, Transport

T = TypeVar("T")


class TransportWrapper:
    """Forwards every operation. A subclass overrides `around` to act before and after one."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.size, self.peers_on_host = inner.rank, inner.size, inner.peers_on_host
        self._wrapped: dict[str, Self] = {}

    def around(self, operation: str, nbytes: int, call: Callable[..., T], *arguments: Any) -> T:
        """Call one operation that exchanges `nbytes` bytes."""
        return call(*arguments)

    def rewrap(self, inner: Transport) -> Self:
        """The same wrapper around another part of the same transport."""
        return type(self)(inner)

    def _part(self, name: str) -> Self:
        if name not in self._wrapped:
            part = getattr(self.inner, name)
            self._wrapped[name] = self if part is self.inner else self.rewrap(part)
        return self._wrapped[name]

    @property
    def on_host(self) -> Self:
        return self._part("on_host")

    @property
    def across(self) -> Self:
        return self._part("across")

    @property
    def messages(self) -> Self:
        return self._part("messages")

    def split(self, groups: Sequence[tuple[int, ...]]) -> Self:
        return self.rewrap(self.around("split", 0, self.inner.messages.split, groups))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.around("all_reduce", tensor.nbytes, self.inner.all_reduce, tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        return self.around("broadcast", tensor.nbytes, self.inner.broadcast, tensor, root)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        # an estimate, as if all tensors had the same size; a wrapper that counts uses the result
        return self.around("all_gather", tensor.nbytes * self.size, self.inner.all_gather, tensor)

    def send(self, tensor: Tensor, to: int, ahead: int = 0) -> None:
        self.around("send", tensor.nbytes, self.inner.send, tensor, to, ahead)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        return self.around("recv", tensor.nbytes, self.inner.recv, tensor, source)

    def recv_any(self, tensor: Tensor) -> int:
        return self.around("recv_any", tensor.nbytes, self.inner.messages.recv_any, tensor)

    def barrier(self) -> None:
        self.around("barrier", 0, self.inner.barrier)

    def share(self, name: str, nbytes: int) -> Tensor:
        return self.around("share", 0, self.inner.share, name, nbytes)

    @contextmanager
    def lock(self, number: int = 0) -> Iterator[None]:
        """Only acquiring the lock is an operation."""
        held = self.inner.lock(number)
        self.around("lock", 0, held.__enter__)
        try:
            yield
        finally:
            held.__exit__(None, None, None)

    def wait_for(self, ready: Callable[[], bool], seconds: float, what: Awaited = "work") -> bool:
        return self.around(what, 0, self.inner.wait_for, ready, seconds, what)

    def notify(self) -> None:
        self.inner.notify()

    def copy_shared(self, tensor: Tensor, out: Tensor) -> Tensor:
        return self.around("copy_shared", tensor.nbytes, self.inner.copy_shared, tensor, out)

    def add_shared(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        return self.around("add_shared", out.nbytes, self.inner.add_shared, parts, out)

    def close(self) -> None:
        self.inner.close()

    def __getattr__(self, name: str) -> Any:
        """Attributes that only some transports have, such as `process_group`."""
        if name == "inner":  # before `__init__` has set it: this would recurse
            raise AttributeError(name)
        return getattr(self.inner, name)
