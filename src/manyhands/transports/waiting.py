"""How long a worker spins, yields and sleeps while it waits, and what it says when it waits in vain."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from manyhands.core import environment, formatting
from manyhands.core.errors import DeadlineError, PeerLostError

SPINS = 4000  # looks at a flag, some 40 ns each, before the core is offered to others
YIELDING = 2e-3  # seconds of offering the core before the first sleep
SLICE = 16  # then sleep for this part of the time waited so far: nobody oversleeps by more than that
SHORTEST, LONGEST = 20e-6, 1e-3  # seconds of one sleep
LOOK = 4e-3  # seconds between two looks for dead peers and at the deadline

_offer_core: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))  # macOS has none


def spins(workers: int) -> int:
    """How often to look before yielding: not at all where workers outnumber the cores.

    Whoever spins there holds the core that the peer needs which it is waiting for.
    """
    return SPINS if workers <= environment.cores() else 0


def yielding(workers: int) -> float:
    """How long to offer the core before sleeping: not at all where workers outnumber the cores.

    `sched_yield` gives the core to whoever queues for this very core; a core that falls idle takes a worker
    away from another one's queue.
    """
    return YIELDING if workers <= environment.cores() else 0.0


class Wait:
    """One wait that spinning did not end."""

    __slots__ = ("_looked", "_since", "_timeout", "_yielding")

    def __init__(self, timeout: float, yielding: float = YIELDING) -> None:
        self._since = self._looked = time.perf_counter()
        self._timeout, self._yielding = timeout, yielding

    def rest(self) -> bool:
        """Let others run for a moment; True every few milliseconds: time to look for the dead."""
        now = time.perf_counter()
        waited = now - self._since
        if waited < self._yielding:
            _offer_core()
        else:
            time.sleep(min(max(waited / SLICE, SHORTEST), LONGEST))
        if now - self._looked < LOOK:
            return False
        self._looked = now
        return True

    @property
    def over(self) -> bool:
        """Whether it has lasted longer than it may."""
        return time.perf_counter() - self._since > self._timeout


def poll(ready: Callable[[], bool], seconds: float, spins: int = 0, yielding: float = 0.0) -> bool:
    """Look until it is so, resting in between, at most so long."""
    for _ in range(max(1, spins // 40)):  # one look costs as much as many at a flag
        if ready():
            return True
    wait = Wait(seconds, yielding)
    while not wait.over:
        wait.rest()
        if ready():
            return True
    return False


_first, _second = threading.Lock(), threading.Lock()


def fence() -> None:
    """Order what was written or read before this against what is after it, on every processor.

    x86 keeps the order of writes by itself; ARM does not, and a peer could see a flag before the data it
    announces. Python has no fence of its own, but releasing one lock and taking another is one: nothing
    sinks below the release, nothing rises above the acquisition, and the two stay in their order.
    """
    with _first:
        pass
    with _second:
        pass


def workers(ranks: Sequence[int]) -> str:
    """`worker 1`, `workers 1 and 3`; nobody in particular is `the other workers`."""
    if not ranks:
        return "the other workers"
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    return f"workers {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def late(timeout: float, doing: str, ranks: Sequence[int] = ()) -> DeadlineError:
    """`waited 3.0 s in barrier 12 for worker 1`."""
    return DeadlineError(f"waited {formatting.duration(timeout)} in {doing} for {workers(ranks)}")


def lost(doing: str, ranks: Sequence[int] = ()) -> PeerLostError:
    """`worker 1 is gone (noticed in barrier 12)`."""
    who = workers(ranks) if ranks else "a worker"
    return PeerLostError(f"{who} {'are' if len(ranks) > 1 else 'is'} gone (noticed in {doing})")
