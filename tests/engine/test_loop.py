"""The trainer's decisions, one by one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.callbacks.base import Callback
from manyhands.callbacks.journal import Journal
from manyhands.core.errors import InterruptedRunError
from manyhands.engine.timing.clock import Clock
from manyhands.records.phases import PHASES
from manyhands.records.record import Start, StepRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.runs import train


def interrupted_at(number: int, out: Path) -> mh.RunRecord:
    """Press Ctrl-C at a certain step; a callback in the background would do so a moment later."""
    take = Journal.on_step

    def on_step(self: Journal, step: StepRecord) -> None:
        take(self, step)
        if step.step == number:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "on_step", on_step)
        return train.run(RunSpec.of(task="quadratic", epochs=1, threads=1), out=out)


def test_a_signal_ends_the_run_after_the_next_step(here: Path) -> None:
    with pytest.raises(
        InterruptedRunError, match=r"^interrupted by SIGINT at step 5; the last checkpoint is of step 5;"
    ):
        interrupted_at(4, here / "run")
    whole = mh.train("quadratic", epochs=1, threads=1, quiet=True)
    resumed = mh.train(str(here / "run"), resume=True, quiet=True)
    assert (resumed.steps, resumed.metric) == (whole.steps, whole.metric)


@pytest.mark.parametrize("step", [9, 10])
def test_a_signal_at_the_last_step_changes_nothing(here: Path, step: int) -> None:
    """Or the run would be neither finished nor have anything left to do, and never be evaluated."""
    record = interrupted_at(step, here / "run")
    assert record.status == "finished"
    assert record.metric is not None


def test_the_handlers_of_the_caller_come_back(here: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    mh.train("quadratic", epochs=1, quiet=True)
    assert signal.getsignal(signal.SIGINT) is before


def test_it_can_run_outside_the_main_thread(here: Path) -> None:
    """Where no signal handler can be set; an executor of trials may do that."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        record = pool.submit(mh.train, "quadratic", epochs=1, quiet=True).result()
    assert record.status == "finished"


def test_checkpoints_come_by_the_clock_and_at_the_end(here: Path) -> None:
    def steps(folder: str) -> list[str]:
        return sorted(path.name for path in (here / folder / "checkpoints").iterdir())

    mh.train("quadratic", epochs=1, checkpoint_every=0, keep=4, out=here / "every", quiet=True)
    mh.train("quadratic", epochs=1, checkpoint_every=1000, out=here / "end", quiet=True)
    assert steps("every") == [f"step-{step:09d}.safetensors" for step in (7, 8, 9, 10)]
    assert steps("end") == ["step-000000010.safetensors"]


def test_the_journal_is_whole_before_a_checkpoint_is(here: Path) -> None:
    """A checkpoint never knows of a step that the journal does not."""
    seen: list[tuple[int, int]] = []

    class Look(Callback):
        def on_step(self, step: StepRecord) -> None:
            saved = [int(path.stem[5:]) for path in (here / "run/checkpoints").glob("step-*")]
            seen.append((max(saved, default=0), len(RunFolder(here / "run").steps())))

    train.run(
        RunSpec.of(task="quadratic", epochs=3, checkpoint_every=0), out=here / "run", callbacks=[Look()]
    )
    assert len(seen) == 30
    assert all(saved <= journal for saved, journal in seen)


class TestClock:
    def test_an_inner_phase_pauses_the_outer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
        monkeypatch.setattr("time.perf_counter", lambda: next(now))
        clock = Clock()  # 0
        with clock.phase("communication"), clock.phase("wait"):  # 1, 3
            pass  # 6, 10
        assert clock.stopped() == {
            **dict.fromkeys(PHASES, 0.0),
            "other": 6.0,
            "communication": 6.0,
            "wait": 3.0,
        }

    def test_a_phase_that_is_no_training_does_not_count_while_it_lasts(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A worker that waits for others' evaluations asked in the middle of one, and stopped too early."""
        now = [0.0]
        monkeypatch.setattr("time.perf_counter", lambda: now[0])
        clock, seen = Clock(), []
        for phase in ("forward", "evaluation", "backward", "checkpoint"):
            with clock.phase(phase):
                for _ in range(2):
                    now[0] += 1.0
                    seen.append(clock.training_seconds)
        assert seen == [1.0, 2.0, 2.0, 2.0, 3.0, 4.0, 4.0, 4.0]
        assert clock.seconds == 8.0

    def test_an_exception_leaves_the_clock_where_it_happened(self) -> None:
        """A worker that fails in backward says so, although the exception has left backward by then."""
        clock = Clock()
        with pytest.raises(ValueError, match="oops"), clock.phase("backward"), clock.phase("communication"):
            raise ValueError("oops")
        assert clock.current == "communication"

    def test_a_device_is_waited_for_at_every_change(self) -> None:
        waits: list[int] = []
        clock = Clock(lambda: waits.append(1))
        with clock.phase("forward"):
            pass
        assert len(waits) == 2


def test_what_happens_before_the_first_step_is_not_training(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was once: a short run seemed to spend an eighth of its time in `other`."""
    ready: list[float] = []

    def on_start(self: Journal, start: Start) -> None:  # a disk that takes a while
        time.sleep(0.3)
        ready.append(time.perf_counter())

    monkeypatch.setattr(Journal, "on_start", on_start)
    record = train.run(RunSpec.of(task="quadratic", epochs=1), out=here / "run")
    assert record.seconds <= time.perf_counter() - ready[0]
