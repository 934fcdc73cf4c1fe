"""What workers do in the launchers' conformance suite, apart from it: a worker need not import pytest."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from manyhands.errors import DivergedError, PeerLostError, UsageError
from manyhands.place import Place, Status

LONG = 300.0  # what a worker sleeps that nobody waits for: tests that pass are over long before


def add_rank(place: Place, number: int) -> tuple[int, int, int]:
    """A worker function at module level, so that any launcher can send it anywhere."""
    return place.rank, place.size, number + place.rank


def surroundings(place: Place) -> dict[str, Any]:
    """What a worker finds around it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    told = {name: os.environ.get(name) for name in names}
    return {**told, "pid": os.getpid(), "hosts": place.hosts, "folder": str(Path.cwd()), "argv": sys.argv}


def chat(place: Place, count: int) -> list[list[int]]:
    """Tell and exchange many small things."""
    values = []
    for number in range(count):
        place.line.tell((place.rank, number))
        if number % 50 == 0:
            values.append(place.line.exchange(1000 * number + place.rank))
    return values


def echo(place: Place, data: bytes) -> bytes:
    """A big result for a big argument."""
    return data[::-1]


def fail(place: Place, rank: int = 0) -> None:
    """A worker that fails, and others that wait for it."""
    place.line.watch(lambda: Status(12, "wait" if place.rank != rank else "forward", "barrier 9", 1))
    if place.rank == rank:
        print("about to fail")
        raise ValueError(f"rank {place.rank} fails on purpose")
    time.sleep(LONG)


def diverge(place: Place) -> None:
    """All of them raise one of our errors, the higher ranks first."""
    time.sleep(0.2 / (1 + place.rank))
    raise DivergedError(f"rank {place.rank} diverged")


def misuse(place: Place) -> None:
    """One of them raises one of our errors, the others never would."""
    if place.rank == place.size - 1:
        raise UsageError("there is no task of that name")
    time.sleep(LONG)


def blame_another(place: Place) -> None:
    """Rank 0 notices that its peer is gone before anybody knows why."""
    if place.rank == 0:
        raise PeerLostError("rank 1 is gone")
    time.sleep(0.2)
    os._exit(3)


def leave(place: Place, how: str) -> None:
    """The last rank ends itself; the others wait in a barrier."""
    last = place.rank == place.size - 1
    status = Status(1204, "backward", "", 7) if last else Status(1204, "wait", "barrier 2,408", 7)
    place.line.watch(lambda: status)
    time.sleep(0.3)
    if last:
        if how == "exit":
            sys.exit(3)
        if how == "_exit":
            os._exit(3)
        os.kill(os.getpid(), signal.Signals[how])
    time.sleep(LONG)


def hang_in_data(place: Place) -> None:
    """The last rank stands still while it loads data; the others wait for it."""
    last = place.rank == place.size - 1
    status = Status(5, "data", "", 3) if last else Status(5, "communication", "all_reduce 12", 4)
    place.line.watch(lambda: status)
    time.sleep(LONG)


def until_stopped(place: Place, obedient: bool) -> int | None:
    """Work until the parent asks to stop, or in spite of it."""
    place.line.tell(("ready", place.rank, os.getpid()))
    until = time.monotonic() + LONG
    while time.monotonic() < until and not (obedient and place.line.stop):
        time.sleep(0.01)
    return place.line.stop


def square(number: int) -> int:
    """A trial."""
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number * number


def crash(number: int) -> int:
    """A trial that kills its process when it is odd."""
    if number % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def nap(seconds: float) -> int:
    """A trial that takes its time."""
    time.sleep(seconds)
    return os.getpid()
