"""Workers that are killed at any moment, also while others come in their place: the others do not care."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from typing import Any

import pytest

from launchers.workers import struggle
from manyhands.launchers.base import Supervision
from manyhands.launchers.local import LocalLauncher
from manyhands.launchers.processes import local_processes
from manyhands.testing.launchers import left_over, processes_below

PRELOAD = ("manyhands.testing.worker_functions",)
SIZE = 4
SECONDS = 1.5


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_at_any_moment(seed: int) -> None:
    """Rank 0 is not spare, and at least one that is spare is left alone: all others die again and again."""
    before = left_over()
    here: dict[int, int] = {}
    lost: list[tuple[int, str]] = []
    done = threading.Event()

    def hear(message: Any) -> None:
        rank, pid = message
        here.setdefault(rank, pid)  # the first of each rank

    def kill() -> None:
        choice = random.Random(seed)
        while len(here) < SIZE and not done.wait(0.01):
            pass
        time.sleep(0.3)  # all have begun
        while not done.wait(choice.uniform(0, 0.05)):
            others = sorted(
                set(processes_below(local_processes.fork_server(PRELOAD).pid)) - {here[0], here[1]}
            )
            for pid in others[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, choice.choice([signal.SIGKILL, signal.SIGSEGV]))

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    supervision = Supervision(
        hear,
        spare=frozenset(range(1, SIZE)),
        replacements=1000,
        lost=lambda *what: lost.append(what),
        timeout=5,
    )
    begun = time.monotonic()
    try:
        results = LocalLauncher(preload=PRELOAD).launch(
            struggle, SIZE, time.time() + SECONDS, supervision=supervision
        )
    finally:
        done.set()
        thread.join()
    assert time.monotonic() - begun < SECONDS + 5
    assert len(lost) > 5
    assert {rank for rank, _ in lost} == {2, 3}
    for rank, one in enumerate(results):
        if one is not None:
            joining, values = one
            assert joining == (rank in {2, 3})
            assert len(values) == SIZE
            assert values[rank] == rank
            assert all(value in (None, other) for other, value in enumerate(values))
    assert results[0] is not None
    assert results[1] is not None
    assert results[0][1] == results[1][1]
    assert left_over() - before == set()
