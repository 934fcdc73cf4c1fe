"""A transport that counts and times what passes through it (law 7): no result changes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, final, get_args

from manyhands.engine.timing.clock import Clock
from manyhands.records.phases import ASIDE
from manyhands.transports.base import Awaited, Transport
from manyhands.transports.wrapper import TransportWrapper

T = TypeVar("T")


_WAITS = ("barrier", "lock", *get_args(Awaited))  # in which nothing is moved


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
class CountingTransport(TransportWrapper):
    """Counts calls, bytes and seconds, and charges them on the worker's clock: what moves nothing is `wait`.

    What is exchanged while evaluating or saving is part of that, not of training. Another thread may read
    `current` and `moves` at any time.
    """

    def __init__(self, inner: Transport, clock: Clock | None = None, books: _Books | None = None) -> None:
        super().__init__(inner)
        self._clock = clock
        self._books = books if books is not None else _Books()

    def rewrap(self, inner: Transport) -> Self:
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
