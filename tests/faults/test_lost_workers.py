"""Workers are killed at any moment, also while they are being replaced: the others are not affected."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from typing import Any

import pytest

from launchers.functions import struggle
from manyhands.launchers.base import SupervisionOptions
from manyhands.launchers.local import LocalLauncher
from manyhands.launchers.processes import local_processes
from manyhands.testing.launchers import left_over, processes_below
from manyhands.testing.worker_functions import add_rank

PRELOAD = ("manyhands.testing.worker_functions",)
SIZE = 4
SECONDS = 1.5


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_at_any_moment(seed: int) -> None:
    """Rank 0 is needed, and rank 1 is left alone: the others are killed again and again."""
    LocalLauncher(preload=PRELOAD).launch(add_rank, 1, 0)  # the fork server runs before the time is counted
    before = left_over()
    first: dict[int, int] = {}  # pid of the first process, by rank
    lost: list[tuple[int, str]] = []
    done = threading.Event()

    def on_message(message: Any) -> None:
        rank, pid = message
        first.setdefault(rank, pid)

    def kill() -> None:
        choice = random.Random(seed)
        while len(first) < SIZE and not done.wait(0.01):
            pass
        time.sleep(0.3)  # all have started
        while not done.wait(choice.uniform(0, 0.05)):
            others = sorted(
                set(processes_below(local_processes.fork_server(PRELOAD).pid)) - {first[0], first[1]}
            )
            for pid in others[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, choice.choice([signal.SIGKILL, signal.SIGSEGV]))

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    supervision = SupervisionOptions(
        on_message,
        expendable=frozenset(range(1, SIZE)),
        max_replacements=1000,
        on_lost=lambda *what: lost.append(what),
        timeout=5,
    )
    started = time.monotonic()
    try:
        results = LocalLauncher(preload=PRELOAD).launch(
            struggle, SIZE, time.time() + SECONDS, supervision=supervision
        )
    finally:
        done.set()
        thread.join()
    assert time.monotonic() - started < SECONDS + 5
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
