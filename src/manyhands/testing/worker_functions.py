"""What workers do in the launchers' conformance suite, apart from it: a worker need not import pytest."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manyhands.core.errors import DivergedError, PeerLostError, UsageError
from manyhands.core.rank_info import STATUS, RankInfo, RankStatus

LONG = 300.0  # what a worker sleeps that nobody waits for: tests that pass are over long before


def add_rank(place: RankInfo, number: int) -> tuple[int, int, int]:
    """A worker function at module level, so that any launcher can send it anywhere."""
    return place.rank, place.size, number + place.rank


def surroundings(place: RankInfo) -> dict[str, Any]:
    """What a worker finds around it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    told = {name: os.environ.get(name) for name in names}
    return {**told, "pid": os.getpid(), "hosts": place.hosts, "folder": str(Path.cwd()), "argv": sys.argv}


def chat(place: RankInfo, count: int) -> list[list[int]]:
    """Tell and exchange many small things."""
    values = []
    for number in range(count):
        place.line.tell((place.rank, number))
        if number % 50 == 0:
            values.append(place.line.exchange(1000 * number + place.rank))
    return values


def echo(place: RankInfo, data: bytes) -> bytes:
    """A big result for a big argument."""
    return data[::-1]


def fail(place: RankInfo, rank: int = 0) -> None:
    """A worker that fails, and others that wait for it."""
    place.line.watch(lambda: RankStatus(12, "wait" if place.rank != rank else "forward", "barrier 9", 1))
    if place.rank == rank:
        print("about to fail")
        raise ValueError(f"rank {place.rank} fails on purpose")
    time.sleep(LONG)


def diverge(place: RankInfo) -> None:
    """All of them raise one of our errors, the higher ranks first."""
    time.sleep(0.2 / (1 + place.rank))
    raise DivergedError(f"rank {place.rank} diverged")


def misuse(place: RankInfo) -> None:
    """One of them raises one of our errors, the others never would."""
    if place.rank == place.size - 1:
        raise UsageError("there is no task of that name")
    time.sleep(LONG)


def blame_another(place: RankInfo) -> None:
    """Rank 0 notices that its peer is gone before anybody knows why."""
    if place.rank == 0:
        raise PeerLostError("rank 1 is gone")
    time.sleep(0.2)
    os._exit(3)


def leave(place: RankInfo, how: str) -> None:
    """The last rank ends itself; the others wait in a barrier."""
    last = place.rank == place.size - 1
    status = RankStatus(1204, "backward", "", 7) if last else RankStatus(1204, "wait", "barrier 2,408", 7)
    place.line.watch(lambda: status)
    time.sleep(0.3)
    if last:
        end(place, how)
    time.sleep(LONG)


def end(place: RankInfo, how: str) -> None:
    """Raise, exit, hang, or be struck by a signal."""
    if how == "exit":
        sys.exit(3)
    if how == "_exit":
        os._exit(3)
    if how == "raise":
        raise ValueError(f"rank {place.rank} fails on purpose")
    if how == "peer":
        raise PeerLostError("rank 0 is gone")
    if how == "diverge":
        raise DivergedError(f"rank {place.rank} diverged")
    if how != "hang":
        os.kill(os.getpid(), signal.Signals[how])
    time.sleep(LONG)


def hang_in_data(place: RankInfo) -> None:
    """The last rank stands still while it loads data; the others wait for it."""
    last = place.rank == place.size - 1
    status = RankStatus(5, "data", "", 3) if last else RankStatus(5, "communication", "all_reduce 12", 4)
    place.line.watch(lambda: status)
    time.sleep(LONG)


def until_stopped(place: RankInfo, obedient: bool) -> int | None:
    """Work until the parent asks to stop, or in spite of it."""
    place.line.tell(("ready", place.rank, os.getpid()))
    until = time.monotonic() + LONG
    while time.monotonic() < until and not (obedient and place.line.stop):
        time.sleep(0.01)
    return place.line.stop


def lose_the_last(place: RankInfo, how: str, phase: str = "backward") -> dict[str, Any]:
    """The last rank ends itself; the others wait for it in an exchange, go on, and exchange again."""
    last, line = place.rank == place.size - 1, place.line
    line.watch(lambda: RankStatus(120, phase, "", 7 if last else time.monotonic_ns()))
    before = line.exchange(place.rank)
    if last:
        line.tell(time.monotonic() + 0.3)
        time.sleep(0.3)  # so that this is heard, and the others wait
        end(place, how)
    during = line.exchange(place.rank)
    known, now = line.gone, time.monotonic()
    return {"before": before, "during": during, "gone": known, "now": now, "after": line.exchange(place.rank)}


def rejoin(place: RankInfo, folder: str, deaths: int, then: str = "") -> list[Any]:
    """The last rank is killed so many times; the one that comes after that takes part, until it ends, too."""
    last, line = place.size - 1, place.line
    if place.rank != last:
        values = [line.exchange(place.rank)]
        wait_until(lambda: last in line.gone)
        values.append(line.exchange(place.rank))
        Path(folder, "exchanged").touch()
        wait_until(lambda: last not in line.gone)
        values.append(line.exchange(place.rank))
        if then:
            wait_until(lambda: last in line.gone)
            values.append(line.exchange(place.rank))
        return values
    life = line.posted.get("life", 0) + 1
    if life == 1:
        line.exchange("the first")
        if line.board is not None:
            STATUS.pack_into(line.board, 0, 120, 0, b"forward", b"")
    line.tell((life, place.joining, line.posted, line.gone, os.getpid()))
    line.post("life", life)
    if life <= deaths:
        time.sleep(0.3)  # so that this is heard
        end(place, "SIGKILL")
    wait_until(Path(folder, "exchanged").exists)
    numbers = [line.joined(), line.joined()]
    third = line.exchange("the new one")
    if then:
        end(place, then)
    return [life, numbers, line.gone, third]


def wait_for_the_last(place: RankInfo, folder: str, how: str) -> str:
    """The last rank is killed, the one after it never joins; the others return, or rank 0 ends, when told."""
    last, line = place.size - 1, place.line
    line.watch(lambda: RankStatus(120, "backward", "", time.monotonic_ns()))
    if place.rank == last:
        if not place.joining:
            time.sleep(0.3)
            end(place, "SIGKILL")
        line.tell(("ready", place.rank, os.getpid()))
        time.sleep(LONG)
    wait_until(lambda: last in line.gone)
    wait_until(Path(folder, "go").exists)
    if how and place.rank == 0:
        end(place, how)
    return "returned"


def stop_together(place: RankInfo, folder: str, obedient: bool = True) -> int | None:
    """The last rank is killed; when another has joined in its place, all work until asked to stop."""
    line = place.line
    line.watch(lambda: RankStatus(120, "backward", "", time.monotonic_ns()))
    if place.rank == place.size - 1:
        if not place.joining:
            time.sleep(0.3)
            end(place, "SIGKILL")
        line.joined()
        Path(folder, "joined").touch()
    wait_until(Path(folder, "joined").exists)
    return until_stopped(place, obedient)


def wait_until(true: Callable[[], bool]) -> None:
    """For as long as nobody would wait for a worker."""
    until = time.monotonic() + LONG
    while not true() and time.monotonic() < until:
        time.sleep(0.005)


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
