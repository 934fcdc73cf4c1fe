"""The clock of a worker: every moment belongs to exactly one phase, so phases add up to the wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from manyhands.records.phases import ASIDE, PHASES, Span, training_phases


class Clock:
    """Charges time to the current phase; entering a phase inside another one pauses the outer.

    An asynchronous device is synchronized at each change of phase: otherwise the time of a kernel would be
    charged to the phase that happens to wait for it. But synchronizing prevents overlap, so it is done only
    while `exact`, and where evaluations and checkpoints begin and end.
    """

    def __init__(self, synchronize: Callable[[], object] | None = None) -> None:
        self.totals = dict.fromkeys(PHASES, 0.0)
        self._lap = dict(self.totals)
        self._synchronize = synchronize
        self.asynchronous = synchronize is not None
        self.exact = True  # if not, only the sum of the phases is right
        self.note: Callable[[], None] | None = None  # called at every change of phase
        self.trace: list[Span] | None = None  # collects spans while it is a list
        self.switches = 0  # a count that does not grow means that the worker is stuck
        self._current = "other"
        self._since = time.perf_counter()

    def start(self, totals: Mapping[str, float] | None = None) -> None:
        """Start now, at zero or at the totals of a resumed run."""
        self.totals = {**dict.fromkeys(PHASES, 0.0), **(totals or {})}
        self._lap = dict(self.totals)
        self.wait()
        self._since = time.perf_counter()

    def wait(self) -> None:
        """Synchronize the device: the time until then belongs to the current phase."""
        if self._synchronize is not None:
            self._synchronize()

    def phase(self, name: str) -> _Phase:
        """`with clock.phase("forward"): ...`."""
        return _Phase(self, name)

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap, phases without any left out."""
        self.switch(self._current)
        spent = {name: total - self._lap[name] for name, total in self.totals.items()}
        self._lap = dict(self.totals)
        return {name: seconds for name, seconds in spent.items() if seconds > 0}

    def stopped(self) -> dict[str, float]:
        """Seconds by phase up to now."""
        self.switch(self._current)
        return dict(self.totals)

    @property
    def current(self) -> str:
        """The current phase."""
        return self._current

    @property
    def seconds(self) -> float:
        """Wall clock since the start."""
        return sum(self.totals.values()) + time.perf_counter() - self._since

    @property
    def training_seconds(self) -> float:
        """Wall clock since the start without evaluation and checkpoints."""
        running = 0.0 if self._current in ASIDE else time.perf_counter() - self._since
        return sum(training_phases(self.totals).values()) + running

    def switch(self, name: str) -> str:
        """Charge the time up to now, enter another phase, and return the previous one."""
        if self._synchronize is not None and (self.exact or (name in ASIDE) != (self._current in ASIDE)):
            self._synchronize()
        now = time.perf_counter()
        before = self._current
        self.totals[before] += now - self._since
        if self.trace is not None:
            self.trace.append(Span(before, self._since, now))
        self._current, self._since = name, now
        self.switches += 1
        if self.note is not None:
            self.note()
        return before


class _Phase:
    __slots__ = ("_before", "_clock", "_name")

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._before = self._clock.switch(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # otherwise the clock stays in the phase of the error, for the diagnosis
            self._clock.switch(self._before)
