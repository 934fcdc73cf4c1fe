"""A bell in shared memory: who waits sleeps until it rings, and no ring is ever lost."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from manyhands.transports.shm import futex as module
from manyhands.transports.shm.futex import FutexEvent

LONG = 20.0  # seconds: nobody sleeps for that long, or it shows
TURNS = 3000


def words(memory: mmap.mmap) -> np.ndarray:
    """Behind the bell's line, a number for each player."""
    return np.frombuffer(memory, dtype=np.int64, offset=64)


def play(rank: int, memory: mmap.mmap, turns: int = TURNS, seconds: float = LONG) -> int:
    """Ping-pong: answer the other's number with one's own; how often a wait ended without it."""
    bell, numbers, missed = FutexEvent(memory, 0, rank, 2), words(memory), 0
    for turn in range(1, turns + 1):
        if rank == 0:
            numbers[0] = turn
            bell.ring()
        missed += not bell.until(lambda turn=turn: bool(numbers[1 - rank] >= turn), seconds)
        if rank == 1:
            numbers[1] = turn
            bell.ring()
    return missed


def both(first: Callable[[], int], second: Callable[[], int]) -> tuple[int, int]:
    found: dict[int, int] = {}
    thread = threading.Thread(target=lambda: found.update({1: second()}))
    thread.start()
    found[0] = first()
    thread.join(LONG)
    return found[0], found[1]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sleep is as long as the wait: a lost ring shows."""
    monkeypatch.setattr(module, "LONGEST", LONG)


@pytest.mark.usefixtures("patient")
def test_no_ring_is_lost_between_threads() -> None:
    """Each turn hangs on one ring: a lost one would be a wait of twenty seconds, and a minute of them."""
    memory, since = mmap.mmap(-1, 4096), time.monotonic()
    assert both(lambda: play(0, memory), lambda: play(1, memory)) == (0, 0)
    assert time.monotonic() - since < LONG


@pytest.mark.usefixtures("patient")
def test_no_ring_is_lost_between_processes(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(4096))
    code = (
        "import mmap, sys; sys.path.insert(0, sys.argv[2]); from transports.test_futex import play; "
        "from manyhands.transports.shm import futex; futex.LONGEST = 20.0; "
        "file = open(sys.argv[1], 'r+b'); sys.exit(play(1, mmap.mmap(file.fileno(), 4096)))"
    )
    tests = str(Path(__file__).parents[1])
    other = subprocess.Popen([sys.executable, "-c", code, str(path), tests])
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096)
    assert play(0, memory, 1, 60.0) == 0  # it has come
    since = time.monotonic()
    assert play(0, memory) == 0
    assert time.monotonic() - since < LONG
    assert other.wait(30) == 0


@pytest.mark.usefixtures("patient")
def test_all_who_wait_are_woken() -> None:
    memory, since = mmap.mmap(-1, 4096), time.monotonic()
    numbers, woken = words(memory), []

    def wait(rank: int) -> None:
        woken.append(FutexEvent(memory, 0, rank, 5).until(lambda: bool(numbers[0]), LONG))

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in range(1, 5)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    numbers[0] = 1
    FutexEvent(memory, 0, 0, 5).ring()
    for thread in threads:
        thread.join()
    assert woken == [True] * 4
    assert time.monotonic() - since < LONG / 2


def test_no_two_ranks_write_the_same_number() -> None:
    """Two rings at one moment: whichever is written last, who saw the word before sees another."""
    memory = mmap.mmap(-1, 4096)
    word = np.frombuffer(memory, dtype=np.uint32, count=1)
    bells, seen = [FutexEvent(memory, 0, rank, 3) for rank in range(3)], []
    for _ in range(100):
        for bell in bells:
            bell.ring()
            seen.append(int(word[0]))
    assert len(set(seen)) == 300


def test_it_waits_for_so_long_and_no_longer() -> None:
    bell, since = FutexEvent(mmap.mmap(-1, 4096), 0, 0, 1), time.monotonic()
    assert not bell.until(lambda: False, 0.03)
    assert 0.03 <= time.monotonic() - since < LONG
    assert bell.until(lambda: True, 0.0)
    assert not bell.until(lambda: False, 0.0)


def test_a_ring_for_nothing_does_not_end_a_wait() -> None:
    memory = mmap.mmap(-1, 4096)
    bell, looks = FutexEvent(memory, 0, 0, 2), []

    def ring() -> None:
        other = FutexEvent(memory, 0, 1, 2)
        for _ in range(20):
            other.ring()
            time.sleep(0.001)

    thread = threading.Thread(target=ring)
    thread.start()
    assert not bell.until(lambda: bool(looks.append(1)), 0.1)
    thread.join()
    assert len(looks) > 2  # it looked, and slept again


def test_sleeping_costs_nothing() -> None:
    """Where the system can ring, who waits does not look again and again."""
    bell, looks = FutexEvent(mmap.mmap(-1, 4096), 0, 0, 1), []
    if bell._call is None:
        pytest.skip("this system has no such call")
    before = time.thread_time()
    assert not bell.until(lambda: bool(looks.append(1)), 0.3)
    assert time.thread_time() - before < 0.1
    assert len(looks) < 10


def test_without_the_system_call_it_looks_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_system_call", lambda: None)
    memory, since = mmap.mmap(-1, 4096), time.monotonic()
    assert both(lambda: play(0, memory, 50), lambda: play(1, memory, 50)) == (0, 0)
    assert time.monotonic() - since < LONG
    assert not FutexEvent(memory, 0, 0, 2).until(lambda: False, 0.01)


@pytest.mark.parametrize(("machine", "system"), [("vax", "linux"), ("x86_64", "darwin")])
def test_a_system_of_another_kind_has_no_call(
    machine: str, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    monkeypatch.setattr(module.sys, "platform", system)
    assert module._system_call() is None


def test_no_word_is_left_mapped() -> None:
    """A bell holds its memory: what is closed is closed when the bell is gone."""
    memory = mmap.mmap(-1, 4096)
    bell = FutexEvent(memory, 0, 0, 1)
    with pytest.raises(BufferError):
        memory.close()
    del bell
    memory.close()
