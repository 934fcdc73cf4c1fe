"""How a worker spins, yields and sleeps while it waits, and the errors of waits that fail."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from manyhands.core import environment, formatting
from manyhands.core.errors import DeadlineError, PeerLostError

SPINS = 4000  # reads of a flag, about 40 ns each, before the first yield
YIELDING = 2e-3  # seconds of yielding before the first sleep
SLEEP_FRACTION = 16  # then sleep for 1/16 of the time waited so far, so that a wait ends at most 1/16 late
SHORTEST_SLEEP, LONGEST_SLEEP = 20e-6, 1e-3  # seconds
CHECK_EVERY = 4e-3  # seconds between two checks for dead peers and for the deadline

_yield_core: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))  # macOS has none


def spins(workers: int) -> int:
    """How often to read a flag before yielding. Zero if there are more workers than cores.

    A worker that spins there holds the core of the peer that it waits for.
    """
    return SPINS if workers <= environment.cores() else 0


def yielding(workers: int) -> float:
    """Seconds of yielding before the first sleep. Zero if there are more workers than cores.

    `sched_yield` only helps workers in the queue of this core. A core that becomes idle takes a worker from
    the queue of another one.
    """
    return YIELDING if workers <= environment.cores() else 0.0


class Wait:
    """One wait that did not end while spinning."""

    __slots__ = ("_checked", "_since", "_timeout", "_yielding")

    def __init__(self, timeout: float, yielding: float = YIELDING) -> None:
        self._since = self._checked = time.perf_counter()
        self._timeout, self._yielding = timeout, yielding

    def rest(self) -> bool:
        """Let others run for a moment. True every few milliseconds: time to check for dead peers."""
        now = time.perf_counter()
        waited = now - self._since
        if waited < self._yielding:
            _yield_core()
        else:
            time.sleep(min(max(waited / SLEEP_FRACTION, SHORTEST_SLEEP), LONGEST_SLEEP))
        if now - self._checked < CHECK_EVERY:
            return False
        self._checked = now
        return True

    @property
    def expired(self) -> bool:
        """Whether it has lasted longer than its timeout."""
        return time.perf_counter() - self._since > self._timeout


def poll(ready: Callable[[], bool], seconds: float, spins: int = 0, yielding: float = 0.0) -> bool:
    """Call `ready` until it is true, for at most `seconds`. Return whether it was."""
    for _ in range(max(1, spins // 40)):  # one call costs as much as 40 reads of a flag
        if ready():
            return True
    wait = Wait(seconds, yielding)
    while not wait.expired:
        wait.rest()
        if ready():
            return True
    return False


_first, _second = threading.Lock(), threading.Lock()


def fence() -> None:
    """A full memory fence: what was written or read before it happens before all that comes after it.

    x86 keeps the order of writes by itself. ARM does not: a peer could see a flag before the data it
    announces. Python has no fence of its own, but releasing one lock and acquiring another is one. Nothing
    moves below the release, nothing moves above the acquisition, and the two stay in their order.
    """
    with _first:
        pass
    with _second:
        pass


def workers(ranks: Sequence[int]) -> str:
    """`worker 1`, `workers 1 and 3`, or `the other workers` if the list is empty."""
    if not ranks:
        return "the other workers"
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    return f"workers {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def deadline_error(timeout: float, operation: str, ranks: Sequence[int] = ()) -> DeadlineError:
    """`waited 3.0 s in barrier 12 for worker 1`."""
    return DeadlineError(f"waited {formatting.duration(timeout)} in {operation} for {workers(ranks)}")


def peer_lost_error(operation: str, ranks: Sequence[int] = ()) -> PeerLostError:
    """`worker 1 is gone (noticed in barrier 12)`."""
    lost = workers(ranks) if ranks else "a worker"
    return PeerLostError(f"{lost} {'are' if len(ranks) > 1 else 'is'} gone (noticed in {operation})")
