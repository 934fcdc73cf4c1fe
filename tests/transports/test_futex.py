"""An event in shared memory: waiters sleep until they are notified, and no notification is lost."""

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

LONG = 20.0  # seconds: a sleep that takes this long is a failure
TURNS = 3000


def counters(memory: mmap.mmap) -> np.ndarray:
    """After the line of the event, one counter per player."""
    return np.frombuffer(memory, dtype=np.int64, offset=64)


def play(rank: int, memory: mmap.mmap, turns: int = TURNS, seconds: float = LONG) -> int:
    """Ping-pong: answer the counter of the other with one's own. Return how many waits timed out."""
    event, numbers, missed = FutexEvent(memory, 0, rank, 2), counters(memory), 0
    for turn in range(1, turns + 1):
        if rank == 0:
            numbers[0] = turn
            event.notify()
        missed += not event.wait_for(lambda turn=turn: bool(numbers[1 - rank] >= turn), seconds)
        if rank == 1:
            numbers[1] = turn
            event.notify()
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
    """Let one sleep last as long as the wait, so that a lost notification shows."""
    monkeypatch.setattr(module, "LONGEST_SLEEP", LONG)


@pytest.mark.usefixtures("patient")
def test_no_notification_is_lost_between_threads() -> None:
    """Each turn needs one notification: a lost one would be a wait of 20 seconds."""
    memory, since = mmap.mmap(-1, 4096), time.monotonic()
    assert both(lambda: play(0, memory), lambda: play(1, memory)) == (0, 0)
    assert time.monotonic() - since < LONG


@pytest.mark.usefixtures("patient")
def test_no_notification_is_lost_between_processes(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(4096))
    code = (
        "import mmap, sys; sys.path.insert(0, sys.argv[2]); from transports.test_futex import play; "
        "from manyhands.transports.shm import futex; futex.LONGEST_SLEEP = 20.0; "
        "file = open(sys.argv[1], 'r+b'); sys.exit(play(1, mmap.mmap(file.fileno(), 4096)))"
    )
    tests = str(Path(__file__).parents[1])
    other = subprocess.Popen([sys.executable, "-c", code, str(path), tests])
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096)
    assert play(0, memory, 1, 60.0) == 0  # the other process is there
    since = time.monotonic()
    assert play(0, memory) == 0
    assert time.monotonic() - since < LONG
    assert other.wait(30) == 0


@pytest.mark.usefixtures("patient")
def test_all_waiters_are_woken() -> None:
    memory, since = mmap.mmap(-1, 4096), time.monotonic()
    numbers, woken = counters(memory), []

    def wait(rank: int) -> None:
        woken.append(FutexEvent(memory, 0, rank, 5).wait_for(lambda: bool(numbers[0]), LONG))

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in range(1, 5)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    numbers[0] = 1
    FutexEvent(memory, 0, 0, 5).notify()
    for thread in threads:
        thread.join()
    assert woken == [True] * 4
    assert time.monotonic() - since < LONG / 2


def test_no_two_ranks_write_the_same_value() -> None:
    """With two notifications at once, the word has changed whichever is written last."""
    memory = mmap.mmap(-1, 4096)
    word = np.frombuffer(memory, dtype=np.uint32, count=1)
    events, values = [FutexEvent(memory, 0, rank, 3) for rank in range(3)], []
    for _ in range(100):
        for event in events:
            event.notify()
            values.append(int(word[0]))
    assert len(set(values)) == 300


def test_a_wait_ends_at_its_timeout() -> None:
    event, since = FutexEvent(mmap.mmap(-1, 4096), 0, 0, 1), time.monotonic()
    assert not event.wait_for(lambda: False, 0.03)
    assert 0.03 <= time.monotonic() - since < LONG
    assert event.wait_for(lambda: True, 0.0)
    assert not event.wait_for(lambda: False, 0.0)


def test_a_notification_without_a_change_does_not_end_a_wait() -> None:
    memory = mmap.mmap(-1, 4096)
    event, checks = FutexEvent(memory, 0, 0, 2), []

    def notify() -> None:
        other = FutexEvent(memory, 0, 1, 2)
        for _ in range(20):
            other.notify()
            time.sleep(0.001)

    thread = threading.Thread(target=notify)
    thread.start()
    assert not event.wait_for(lambda: bool(checks.append(1)), 0.1)
    thread.join()
    assert len(checks) > 2  # it checked, and slept again


def test_sleeping_takes_no_time_of_the_core() -> None:
    """On a system with futexes a waiter does not poll."""
    event, checks = FutexEvent(mmap.mmap(-1, 4096), 0, 0, 1), []
    if event._call is None:
        pytest.skip("this system has no futexes")
    before = time.thread_time()
    assert not event.wait_for(lambda: bool(checks.append(1)), 0.3)
    assert time.thread_time() - before < 0.1
    assert len(checks) < 10


def test_without_the_system_call_it_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_system_call", lambda: None)
    memory, since = mmap.mmap(-1, 4096), time.monotonic()
    assert both(lambda: play(0, memory, 50), lambda: play(1, memory, 50)) == (0, 0)
    assert time.monotonic() - since < LONG
    assert not FutexEvent(memory, 0, 0, 2).wait_for(lambda: False, 0.01)


@pytest.mark.parametrize(("machine", "system"), [("vax", "linux"), ("x86_64", "darwin")])
def test_other_systems_have_no_futexes(machine: str, system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    monkeypatch.setattr(module.sys, "platform", system)
    assert module._system_call() is None


def test_an_event_keeps_its_memory_mapped() -> None:
    """The memory can only be closed when the event is gone."""
    memory = mmap.mmap(-1, 4096)
    event = FutexEvent(memory, 0, 0, 1)
    with pytest.raises(BufferError):
        memory.close()
    del event
    memory.close()
