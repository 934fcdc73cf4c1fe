"""The gate at which workers sleep between two blocks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from manyhands.core.pause_gate import PauseGate, Progress, WorkerGate


@pytest.fixture
def gate(tmp_path: Path) -> PauseGate:
    return PauseGate(tmp_path / "gate", ranks=2)


def workers(gate: PauseGate) -> list[WorkerGate]:
    return [WorkerGate(gate.path, rank, gate.ranks) for rank in range(gate.ranks)]


def test_a_block_lies_between_the_first_and_the_last_step(gate: PauseGate) -> None:
    first, _ = workers(gate)
    gate.open()
    for step in range(1, 5):
        first.mark(Progress(step, 10 * step, 2.0 * step))
    gate.close()
    assert first.is_closed(4, together=False)
    assert gate.progress(0) == Progress(3, 30, 6.0)
    assert gate.progress(1) == Progress(0, 0, 0.0)


def test_a_new_block_starts_from_zero(gate: PauseGate) -> None:
    first, _ = workers(gate)
    for block in range(3):
        gate.open()
        assert gate.progress(0) == Progress()  # not what it did in the last block
        for step in (1, 2):
            total = 2 * block + step
            first.mark(Progress(total, 100 * total, 0.5 * total))
        gate.close()
        assert gate.progress(0) == Progress(1, 100, 0.5)


def test_workers_that_step_together_sleep_after_the_same_step(gate: PauseGate) -> None:
    first, second = workers(gate)
    gate.open()
    assert not second.is_closed(7, together=True)
    gate.close()
    # rank 0 has not been at the gate: the other one must not sleep, or rank 0 would wait for it
    assert not second.is_closed(7, together=True)
    assert not first.is_closed(7, together=True)  # announces step 8
    assert not second.is_closed(7, together=True)
    assert second.is_closed(8, together=True)
    assert first.is_closed(8, together=True)


def test_a_worker_that_is_ahead_goes_on_to_the_next_average(gate: PauseGate) -> None:
    """It slept at once, or waited for a sleeping peer: the pause was taken for communication."""
    first, second = workers(gate)  # local SGD: copies are at different steps, and average after step 16
    gate.open()
    gate.close()
    assert not first.is_closed(7, together=True, shared=False)  # announces
    assert not second.is_closed(11, together=True, shared=False)
    assert not first.is_closed(8, together=True, shared=False)
    assert second.is_closed(16, together=True)
    assert first.is_closed(16, together=True)


def test_a_sleeping_worker_says_so_and_wakes_when_the_gate_opens(gate: PauseGate) -> None:
    first, _ = workers(gate)
    gate.open()
    first.mark(Progress(1, 1, 1.0))
    gate.close()
    assert not gate.is_asleep(0)
    assert not first.sleep(0.02)
    assert gate.is_asleep(0)
    opened = []
    sleeper = threading.Thread(target=lambda: opened.append(first.sleep(30)))
    sleeper.start()
    gate.open()
    sleeper.join(10)
    assert opened == [True]
    assert not gate.is_asleep(0)


def test_the_end_opens_the_gate(gate: PauseGate) -> None:
    first, _ = workers(gate)
    gate.open()
    gate.close()
    assert not first.over
    gate.end()
    assert first.over
    assert first.sleep(0)
    assert not first.is_closed(3, together=False)


def test_the_time_while_it_was_closed_is_counted(gate: PauseGate, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = workers(gate)
    now = iter([5_000_000_000, 7_500_000_000])
    monkeypatch.setattr("manyhands.core.pause_gate.time.monotonic_ns", lambda: next(now))
    gate.open()
    gate.close()
    assert first.seconds_closed == 0
    gate.open()
    assert first.seconds_closed == 2.5


def test_a_gate_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "else").write_text("")
    (tmp_path / "gate").symlink_to(tmp_path / "else")
    with pytest.raises(OSError, match="it is a link"):
        PauseGate(tmp_path / "gate", 1)
