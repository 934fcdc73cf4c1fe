"""Transports around transports, which count, delay or fail what passes through them (law 7).

No result changes. What is reached through `on_host` and `across` is wrapped alike, with the outer's state.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, final, get_args

from torch import Tensor

from manyhands.clock import ASIDE, Clock
from manyhands.faults import Fault
from manyhands.transports.base import Awaited, InPlace, Transport

T = TypeVar("T")
_WAITS = ("barrier", "lock", *get_args(Awaited))  # in which nothing is moved


class Wrapper:
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


@dataclass(slots=True)
class Traffic:
    """What one operation has cost this rank in training so far."""

    calls: int = 0
    bytes: int = 0  # handed over or taken, in the unit of transports/base.py
    seconds: float = 0.0


@dataclass(slots=True)
class _Books:
    """What all parts of a counted transport write into."""

    traffic: dict[str, Traffic] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)  # all of them, for whoever asks what is under way
    operation: str = ""
    moves: int = 0


@final
class Counting(Wrapper):
    """Counts calls, bytes and seconds, and charges them on the worker's clock: what moves nothing is `wait`.

    What is exchanged while evaluating or saving is part of that, not of training. Another thread may read
    `current` and `moves` at any time.
    """

    def __init__(self, inner: Transport, clock: Clock | None = None, books: _Books | None = None) -> None:
        super().__init__(inner)
        self._clock = clock
        self._books = books if books is not None else _Books()

    def again(self, inner: Transport) -> Self:
        """In the same books."""
        return type(self)(inner, self._clock, self._books)

    def begin(self) -> None:
        """Training begins: what was exchanged until here is no part of it."""
        self._books.traffic.clear()

    @property
    def traffic(self) -> dict[str, Traffic]:
        """By operation."""
        return self._books.traffic

    @property
    def current(self) -> str:
        """What is under way, `all_reduce 12`, or nothing."""
        operation, calls = self.under_way
        return f"{operation} {calls:,}" if operation else ""

    @property
    def under_way(self) -> tuple[str, int]:
        """The same in parts: the operation, and which of its kind it is."""
        operation = self._books.operation
        return operation, self._books.calls[operation] if operation else 0

    @property
    def moves(self) -> int:
        """Grows with every operation that is done."""
        return self._books.moves

    def around(self, operation: str, nbytes: int, call: Callable[..., T], *arguments: Any) -> T:
        """Between two looks at the clock."""
        books, clock = self._books, self._clock
        books.calls[operation] += 1
        books.operation = operation
        aside = clock is not None and clock.current in ASIDE
        if aside:
            clock = None
        before = clock.switch("wait" if operation in _WAITS else "communication") if clock else ""
        since = time.perf_counter()
        result = call(*arguments)  # whoever fails in it is still asked what it was doing
        seconds = time.perf_counter() - since
        if clock:
            clock.switch(before)
        books.operation = ""
        books.moves += 1
        if not aside:
            if operation == "all_gather":  # now the sizes are known
                gathered: Any = result
                nbytes = sum([part.nbytes for part in gathered])
            self._enter(operation, nbytes if self.size > 1 else 0, seconds)
        return result

    def _enter(self, operation: str, nbytes: int, seconds: float) -> None:
        entry = self._books.traffic.get(operation)
        if entry is None:
            entry = self._books.traffic[operation] = Traffic()
        entry.calls += 1
        entry.bytes += nbytes
        entry.seconds += seconds


@final
class Delayed(Wrapper):
    """A slower network: `latency` seconds a message, `bandwidth` bytes a second, collectives as rings."""

    def __init__(self, inner: Transport, latency: float, bandwidth: float | None = None) -> None:
        super().__init__(inner)
        self._latency, self._bandwidth = latency, bandwidth

    def again(self, inner: Transport) -> Self:
        """On the same network."""
        return type(self)(inner, self._latency, self._bandwidth)

    def around(self, operation: str, nbytes: int, call: Callable[..., T], *arguments: Any) -> T:
        """As if it had taken so much longer."""
        messages, share = _ring(operation, self.size)
        delay = messages * self._latency
        if self._bandwidth is not None:
            delay += share * nbytes / self._bandwidth
        if delay > 0:
            time.sleep(delay)
        return call(*arguments)


def _ring(operation: str, size: int) -> tuple[int, float]:
    """Messages one after the other, and the part of the bytes that passes one rank's link."""
    steps = size - 1
    costs = {
        "all_reduce": (2 * steps, 2 * steps / size),
        "all_gather": (steps, steps / size),
        "broadcast": (math.ceil(math.log2(size)), 1.0 if steps else 0.0),
        "barrier": (math.ceil(math.log2(size)), 0.0),
        "send": (1, 1.0),
    }
    return costs.get(operation, (0, 0.0))  # memory sends nothing, and a message is paid for by its sender


@final
class Faulty(Wrapper):
    """Lets a scripted fault strike as a rank comes to an operation, while the others wait for it in there."""

    def __init__(
        self, inner: Transport, fault: Fault, step: Callable[[], int], rank: int | None = None
    ) -> None:
        super().__init__(inner)
        self._fault, self._step = fault, step
        self._who = inner.rank if rank is None else rank  # in the gang, whatever part of it this is

    def again(self, inner: Transport) -> Self:
        """The same worker, the same fault."""
        return type(self)(inner, self._fault, self._step, self._who)

    def around(self, operation: str, nbytes: int, call: Callable[..., T], *arguments: Any) -> T:
        """Now, or not yet; what needs nobody's doing is no place to fail in."""
        if operation not in get_args(InPlace) and self._fault.due(self._who, self._step(), "collective"):
            self._fault.strike()
        return call(*arguments)
