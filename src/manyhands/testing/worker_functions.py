"""Worker functions of the launchers' conformance suite, in a module that does not import pytest."""

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

LONG = 300.0  # seconds a worker sleeps that is not waited for: a test that passes ends long before


def add_rank(info: RankInfo, number: int) -> tuple[int, int, int]:
    """Return rank, size, and the sum of a number and the rank."""
    return info.rank, info.size, number + info.rank


def environment(info: RankInfo) -> dict[str, Any]:
    """What a worker finds: variables, pid, hosts, working folder and arguments."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    variables = {name: os.environ.get(name) for name in names}
    return {**variables, "pid": os.getpid(), "hosts": info.hosts, "folder": str(Path.cwd()), "argv": sys.argv}


def chat(info: RankInfo, count: int) -> list[list[int]]:
    """Send and exchange many small values."""
    values = []
    for number in range(count):
        info.channel.tell((info.rank, number))
        if number % 50 == 0:
            values.append(info.channel.exchange(1000 * number + info.rank))
    return values


def echo(info: RankInfo, data: bytes) -> bytes:
    """Return the argument, reversed."""
    return data[::-1]


def fail(info: RankInfo, rank: int = 0) -> None:
    """One worker raises, and the others wait for it."""
    info.channel.watch(lambda: RankStatus(12, "wait" if info.rank != rank else "forward", "barrier 9", 1))
    if info.rank == rank:
        print("about to fail")
        raise ValueError(f"rank {info.rank} fails on purpose")
    time.sleep(LONG)


def diverge(info: RankInfo) -> None:
    """All workers raise a ManyhandsError, the higher ranks first."""
    time.sleep(0.2 / (1 + info.rank))
    raise DivergedError(f"rank {info.rank} diverged")


def misuse(info: RankInfo) -> None:
    """The last rank raises a ManyhandsError, the others keep running."""
    if info.rank == info.size - 1:
        raise UsageError("there is no task of that name")
    time.sleep(LONG)


def blame_another(info: RankInfo) -> None:
    """Rank 0 notices that its peer is gone before the peer has ended."""
    if info.rank == 0:
        raise PeerLostError("rank 1 is gone")
    time.sleep(0.2)
    os._exit(3)


def leave(info: RankInfo, how: str) -> None:
    """The last rank ends; the others wait in a barrier."""
    last = info.rank == info.size - 1
    status = RankStatus(1204, "backward", "", 7) if last else RankStatus(1204, "wait", "barrier 2,408", 7)
    info.channel.watch(lambda: status)
    time.sleep(0.3)
    if last:
        end(info, how)
    time.sleep(LONG)


def end(info: RankInfo, how: str) -> None:
    """Raise, exit, hang, or get a signal."""
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
    """The last rank hangs while it loads data; the others wait for it."""
    last = info.rank == info.size - 1
    status = RankStatus(5, "data", "", 3) if last else RankStatus(5, "communication", "all_reduce 12", 4)
    info.channel.watch(lambda: status)
    time.sleep(LONG)


def until_stopped(info: RankInfo, obedient: bool) -> int | None:
    """Run until the parent asks to stop, or ignore that."""
    info.channel.tell(("ready", info.rank, os.getpid()))
    until = time.monotonic() + LONG
    while time.monotonic() < until and not (obedient and info.channel.stop):
        time.sleep(0.01)
    return info.channel.stop


def lose_the_last(info: RankInfo, how: str, phase: str = "backward") -> dict[str, Any]:
    """The last rank ends; the others wait for it in an exchange, continue, and exchange again."""
    last, channel = info.rank == info.size - 1, info.channel
    channel.watch(lambda: RankStatus(120, phase, "", 7 if last else time.monotonic_ns()))
    before = channel.exchange(info.rank)
    if last:
        channel.tell(time.monotonic() + 0.3)
        time.sleep(0.3)  # so that this arrives, and the others wait
        end(info, how)
    during = channel.exchange(info.rank)
    gone, now = channel.gone, time.monotonic()
    after = channel.exchange(info.rank)
    return {"before": before, "during": during, "gone": gone, "now": now, "after": after}


def rejoin(info: RankInfo, folder: str, deaths: int, then: str = "") -> list[Any]:
    """The last rank and its replacements are killed `deaths` times; the next one takes part, then ends."""
    last, channel = info.size - 1, info.channel
    if info.rank != last:
        values = [channel.exchange(info.rank)]
        wait_until(lambda: last in channel.gone)
        values.append(channel.exchange(info.rank))
        Path(folder, "exchanged").touch()
        wait_until(lambda: last not in channel.gone)
        values.append(channel.exchange(info.rank))
        if then:
            wait_until(lambda: last in channel.gone)
            values.append(channel.exchange(info.rank))
        return values
    life = channel.posted.get("life", 0) + 1
    if life == 1:
        channel.exchange("the first")
        if channel.status_slot is not None:
            STATUS.pack_into(channel.status_slot, 0, 120, 0, b"forward", b"")
    channel.tell((life, info.joining, channel.posted, channel.gone, os.getpid()))
    channel.post("life", life)
    if life <= deaths:
        time.sleep(0.3)  # so that this arrives
        end(info, "SIGKILL")
    wait_until(Path(folder, "exchanged").exists)
    numbers = [channel.joined(), channel.joined()]
    third = channel.exchange("the replacement")
    if then:
        end(info, then)
    return [life, numbers, channel.gone, third]


def wait_for_the_last(info: RankInfo, folder: str, how: str) -> str:
    """The last rank is killed, its replacement never joins; a file lets the others return, or rank 0 end."""
    last, channel = info.size - 1, info.channel
    channel.watch(lambda: RankStatus(120, "backward", "", time.monotonic_ns()))
    if info.rank == last:
        if not info.joining:
            time.sleep(0.3)
            end(info, "SIGKILL")
        channel.tell(("ready", info.rank, os.getpid()))
        time.sleep(LONG)
    wait_until(lambda: last in channel.gone)
    wait_until(Path(folder, "go").exists)
    if how and info.rank == 0:
        end(info, how)
    return "returned"


def stop_together(info: RankInfo, folder: str, obedient: bool = True) -> int | None:
    """The last rank is killed; once its replacement has joined, all run until asked to stop."""
    channel = info.channel
    channel.watch(lambda: RankStatus(120, "backward", "", time.monotonic_ns()))
    if info.rank == info.size - 1:
        if not info.joining:
            time.sleep(0.3)
            end(info, "SIGKILL")
        channel.joined()
        Path(folder, "joined").touch()
    wait_until(Path(folder, "joined").exists)
    return until_stopped(info, obedient)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, at most LONG seconds."""
    until = time.monotonic() + LONG
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)


def square(number: int) -> int:
    """A call for an executor."""
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number * number


def crash(number: int) -> int:
    """A call that kills its process if the number is odd."""
    if number % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def nap(seconds: float) -> int:
    """A call that takes some time; returns its pid."""
    time.sleep(seconds)
    return os.getpid()
