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

_WAITS = ("barrier", "lock", *get_args(Awaited))  # they move no data


@dataclass(slots=True)
class Traffic:
    """What one operation has cost this rank in training so far."""

    calls: int = 0
    bytes: int = 0  # sent or received, in the unit of transports/base.py
    seconds: float = 0.0


@dataclass(slots=True)
class _Counts:
    """What a counting transport and its parts write to."""

    traffic: dict[str, Traffic] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)  # all of them, for the status of this rank
    operation: str = ""
    moves: int = 0


@final
class CountingTransport(TransportWrapper):
    """Counts calls, bytes and seconds, and charges them to the worker's clock: `communication` or `wait`.

    What is exchanged while evaluating or saving is part of that, not of training. Another thread may read
    `current` and `moves` at any time.
    """

    def __init__(self, inner: Transport, clock: Clock | None = None, counts: _Counts | None = None) -> None:
        super().__init__(inner)
        self._clock = clock
        self._counts = counts if counts is not None else _Counts()

    def rewrap(self, inner: Transport) -> Self:
        """A wrapper of a part of the transport, with the same counts."""
        return type(self)(inner, self._clock, self._counts)

    def begin(self) -> None:
        """Training begins: what was exchanged before is not part of it."""
        self._counts.traffic.clear()

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What was exchanged in training, by operation."""
        return self._counts.traffic

    @property
    def current(self) -> str:
        """The operation in progress, such as `all_reduce 12`, or an empty text."""
        operation, calls = self.under_way
        return f"{operation} {calls:,}" if operation else ""

    @property
    def under_way(self) -> tuple[str, int]:
        """The operation in progress, and how many of its kind there were."""
        operation = self._counts.operation
        return operation, self._counts.calls[operation] if operation else 0

    @property
    def moves(self) -> int:
        """Operations that are done."""
        return self._counts.moves

    def around(self, operation: str, nbytes: int, call: Callable[..., T], *arguments: Any) -> T:
        """Make a call, and count and time it."""
        counts, clock = self._counts, self._clock
        counts.calls[operation] += 1
        counts.operation = operation
        aside = clock is not None and clock.current in ASIDE
        if aside:
            clock = None
        before = clock.switch("wait" if operation in _WAITS else "communication") if clock else ""
        since = time.perf_counter()
        result = call(*arguments)  # if it fails, the operation stays in progress, for the diagnosis
        seconds = time.perf_counter() - since
        if clock:
            clock.switch(before)
        counts.operation = ""
        counts.moves += 1
        if not aside:
            if operation == "all_gather":  # now the sizes are known
                gathered: Any = result
                nbytes = sum([part.nbytes for part in gathered])
            self._enter(operation, nbytes if self.size > 1 else 0, seconds)
        return result

    def _enter(self, operation: str, nbytes: int, seconds: float) -> None:
        entry = self._counts.traffic.get(operation)
        if entry is None:
            entry = self._counts.traffic[operation] = Traffic()
        entry.calls += 1
        entry.bytes += nbytes
        entry.seconds += seconds
