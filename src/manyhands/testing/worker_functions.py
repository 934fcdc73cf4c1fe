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


def add_rank(info: RankInfo, number: int) -> tuple[int, int, int]:
    """A worker function at module level, so that any launcher can send it anywhere."""
    return info.rank, info.size, number + info.rank


def surroundings(info: RankInfo) -> dict[str, Any]:
    """What a worker finds around it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    told = {name: os.environ.get(name) for name in names}
    return {**told, "pid": os.getpid(), "hosts": info.hosts, "folder": str(Path.cwd()), "argv": sys.argv}


def chat(info: RankInfo, count: int) -> list[list[int]]:
    """Tell and exchange many small things."""
    values = []
    for number in range(count):
        info.channel.tell((info.rank, number))
        if number % 50 == 0:
            values.append(info.channel.exchange(1000 * number + info.rank))
    return values


def echo(info: RankInfo, data: bytes) -> bytes:
    """A big result for a big argument."""
    return data[::-1]


def fail(info: RankInfo, rank: int = 0) -> None:
    """A worker that fails, and others that wait for it."""
    info.channel.watch(lambda: RankStatus(12, "wait" if info.rank != rank else "forward", "barrier 9", 1))
    if info.rank == rank:
        print("about to fail")
        raise ValueError(f"rank {info.rank} fails on purpose")
    time.sleep(LONG)


def diverge(info: RankInfo) -> None:
    """All of them raise one of our errors, the higher ranks first."""
    time.sleep(0.2 / (1 + info.rank))
    raise DivergedError(f"rank {info.rank} diverged")


def misuse(info: RankInfo) -> None:
    """One of them raises one of our errors, the others never would."""
    if info.rank == info.size - 1:
        raise UsageError("there is no task of that name")
    time.sleep(LONG)


def blame_another(info: RankInfo) -> None:
    """Rank 0 notices that its peer is gone before anybody knows why."""
    if info.rank == 0:
        raise PeerLostError("rank 1 is gone")
    time.sleep(0.2)
    os._exit(3)


def leave(info: RankInfo, how: str) -> None:
    """The last rank ends itself; the others wait in a barrier."""
    last = info.rank == info.size - 1
    status = RankStatus(1204, "backward", "", 7) if last else RankStatus(1204, "wait", "barrier 2,408", 7)
    info.channel.watch(lambda: status)
    time.sleep(0.3)
    if last:
        end(info, how)
    time.sleep(LONG)


def end(info: RankInfo, how: str) -> None:
    """Raise, exit, hang, or be struck by a signal."""
    if how == "exit":
        sys.exit(3)
    if how == "_exit":
        os._exit(3)
    if how == "raise":
        raise ValueError(f"rank {info.rank} fails on purpose")
    if how == "peer":
        raise PeerLostError("rank 0 is gone")
    if how == "diverge":
        raise DivergedError(f"rank {info.rank} diverged")
    if how != "hang":
        os.kill(os.getpid(), signal.Signals[how])
    time.sleep(LONG)


def hang_in_data(info: RankInfo) -> None:
    """The last rank stands still while it loads data; the others wait for it."""
    last = info.rank == info.size - 1
    status = RankStatus(5, "data", "", 3) if last else RankStatus(5, "communication", "all_reduce 12", 4)
    info.channel.watch(lambda: status)
    time.sleep(LONG)


def until_stopped(info: RankInfo, obedient: bool) -> int | None:
    """Work until the parent asks to stop, or in spite of it."""
    info.channel.tell(("ready", info.rank, os.getpid()))
    until = time.monotonic() + LONG
    while time.monotonic() < until and not (obedient and info.channel.stop):
        time.sleep(0.01)
    return info.channel.stop


def lose_the_last(info: RankInfo, how: str, phase: str = "backward") -> dict[str, Any]:
    """The last rank ends itself; the others wait for it in an exchange, go on, and exchange again."""
    last, line = info.rank == info.size - 1, info.channel
    line.watch(lambda: RankStatus(120, phase, "", 7 if last else time.monotonic_ns()))
    before = line.exchange(info.rank)
    if last:
        line.tell(time.monotonic() + 0.3)
        time.sleep(0.3)  # so that this is heard, and the others wait
        end(info, how)
    during = line.exchange(info.rank)
    known, now = line.gone, time.monotonic()
    return {"before": before, "during": during, "gone": known, "now": now, "after": line.exchange(info.rank)}


def rejoin(info: RankInfo, folder: str, deaths: int, then: str = "") -> list[Any]:
    """The last rank is killed so many times; the one that comes after that takes part, until it ends, too."""
    last, line = info.size - 1, info.channel
    if info.rank != last:
        values = [line.exchange(info.rank)]
        wait_until(lambda: last in line.gone)
        values.append(line.exchange(info.rank))
        Path(folder, "exchanged").touch()
        wait_until(lambda: last not in line.gone)
        values.append(line.exchange(info.rank))
        if then:
            wait_until(lambda: last in line.gone)
            values.append(line.exchange(info.rank))
        return values
    life = line.posted.get("life", 0) + 1
    if life == 1:
        line.exchange("the first")
        if line.status_slot is not None:
            STATUS.pack_into(line.status_slot, 0, 120, 0, b"forward", b"")
    line.tell((life, info.joining, line.posted, line.gone, os.getpid()))
    line.post("life", life)
    if life <= deaths:
        time.sleep(0.3)  # so that this is heard
        end(info, "SIGKILL")
    wait_until(Path(folder, "exchanged").exists)
    numbers = [line.joined(), line.joined()]
    third = line.exchange("the new one")
    if then:
        end(info, then)
    return [life, numbers, line.gone, third]


def wait_for_the_last(info: RankInfo, folder: str, how: str) -> str:
    """The last rank is killed, the one after it never joins; the others return, or rank 0 ends, when told."""
    last, line = info.size - 1, info.channel
    line.watch(lambda: RankStatus(120, "backward", "", time.monotonic_ns()))
    if info.rank == last:
        if not info.joining:
            time.sleep(0.3)
            end(info, "SIGKILL")
        line.tell(("ready", info.rank, os.getpid()))
        time.sleep(LONG)
    wait_until(lambda: last in line.gone)
    wait_until(Path(folder, "go").exists)
    if how and info.rank == 0:
        end(info, how)
    return "returned"


def stop_together(info: RankInfo, folder: str, obedient: bool = True) -> int | None:
    """The last rank is killed; when another has joined in its place, all work until asked to stop."""
    line = info.channel
    line.watch(lambda: RankStatus(120, "backward", "", time.monotonic_ns()))
    if info.rank == info.size - 1:
        if not info.joining:
            time.sleep(0.3)
            end(info, "SIGKILL")
        line.joined()
        Path(folder, "joined").touch()
    wait_until(Path(folder, "joined").exists)
    return until_stopped(info, obedient)


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
