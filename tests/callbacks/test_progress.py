"""What a person sees of several workers: efficiency where it is known, and the share of the exchange."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from manyhands.callbacks.progress import ProgressBar, ProgressLines, efficiency, headline, share, where
from manyhands.core import environment
from manyhands.records.record import OneWorker, Start, StepRecord
from manyhands.records.spec import RunSpec


def start(workers: int, one: OneWorker | None) -> Start:
    spec = RunSpec.of(task="mnist-cnn", workers=workers, strategy="allreduce", epochs=1.0, batch=256)
    return Start(
        "runs/x", spec, "lr 0.1", 10, "images", 1000, 1000, 1, "cpu", "accuracy", 0.9, 0, 0, 0.0, one
    )


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (None, ""),
        (OneWorker(100.0, 1), "96 % of 2x"),
        (OneWorker(160.0, 2), "1.20x one worker with 2 threads"),
    ],
)
def test_efficiency_is_against_a_worker_with_as_many_threads(one: OneWorker | None, text: str) -> None:
    assert efficiency(start(2, one), 192.0) == text


SLOW = "speed-up implausible: the baseline was slow"


@pytest.mark.parametrize(
    ("workers", "one", "cores", "text"),
    [
        (2, OneWorker(75.0, 1), 2, "128 % of 2x"),  # may be noise
        (2, OneWorker(40.5, 1), 2, SLOW),  # was: 237 % of 2x
        (2, OneWorker(20.0, 2), 2, SLOW),  # was: 9.60x 1 worker of 2 threads
        (4, OneWorker(60.0, 1), 4, "80 % of 4x"),
        (4, OneWorker(60.0, 1), 2, SLOW),  # four workers on two cores
        (4, OneWorker(60.0, 1), None, "80 % of 4x"),  # perhaps on several machines
        (2, OneWorker(0.0, 1), 2, ""),
    ],
)
def test_what_the_cores_cannot_give_is_not_shown(
    workers: int, one: OneWorker, cores: int | None, text: str
) -> None:
    assert efficiency(start(workers, one), 192.0, cores) == text


@pytest.mark.parametrize(("launcher", "shown"), [("local", SLOW), ("env", "80 % of 4x")])
def test_lines_count_the_cores_where_all_workers_are_here(
    launcher: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "cores", lambda: 2)
    begun = start(4, OneWorker(60.0, 1))
    lines = ProgressLines()
    lines.least = 0.0
    lines.on_start(replace(begun, spec=begun.spec.replace(launcher=launcher)))
    lines.on_step(StepRecord(1, 0, 192, 0.5, 0.1, 1.0, {"forward": 1.0}, 0.8, 0.4))
    assert f"192 images/s · {shown}" in capsys.readouterr().err.splitlines()[-1]


def test_lines_tell_rate_efficiency_and_communication(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines()
    lines.least = 0.0
    lines.on_start(start(2, OneWorker(100.0, 1)))
    phases = {"forward": 0.7, "communication": 0.1, "wait": 0.1, "optimizer": 0.1, "evaluation": 5.0}
    lines.on_step(StepRecord(1, 0, 192, 0.5, 0.1, 1.0, phases, 0.8, 0.4))
    said = capsys.readouterr().err.splitlines()[-1]
    assert "192 images/s · 96 % of 2x · comm 20 %" in said


def test_one_worker_has_no_communication(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines()
    lines.least = 0.0
    lines.on_start(start(1, None))
    lines.on_step(StepRecord(1, 0, 192, 0.5, 0.1, 1.0, {"forward": 1.0}, 0.8, 0.4))
    assert "comm" not in capsys.readouterr().err.splitlines()[-1]


def limited(seconds: float | None, epochs: float = 2.0) -> Start:
    """2,000 samples in two epochs, and perhaps a limit of seconds."""
    begun = start(1, None)
    spec = begun.spec.replace(seconds=seconds, epochs=epochs)
    return replace(begun, spec=spec, horizon=round(1000 * epochs))


def after(samples: int, seconds: float) -> StepRecord:
    return StepRecord(1, samples // 1000, samples, 0.5, 0.1, seconds)


@pytest.mark.parametrize(
    ("seconds", "step", "done", "text"),
    [
        (None, after(500, 3.0), 0.25, "epoch 1/2"),
        (60.0, after(500, 3.0), 0.25, "epoch 1/2"),  # the samples come to an end after 12 s
        (60.0, after(100, 12.0), 0.2, "12/60 s"),  # it was `5 %` and `epoch 1/2`
        (60.0, after(100, 6.0), 0.1, " 6/60 s"),
        (60.0, after(300, 60.02), 1.0, "60/60 s"),  # the limit is seen after the step that passes it
        (0.5, after(100, 0.25), 0.5, "  0/0.5 s"),
    ],
)
def test_the_bar_counts_what_ends_the_run_first(
    seconds: float | None, step: StepRecord, done: float, text: str
) -> None:
    begun = limited(seconds)
    assert share(begun, step) == done
    assert where(begun, step) == text


def test_a_resumed_run_begins_where_it_was() -> None:
    begun = replace(limited(60.0), step=7, samples=100, seconds=15.0)
    assert share(begun, begun) == 0.25


@pytest.mark.parametrize(
    ("seconds", "left"), [(60.0, "1 min 40 s left"), (None, "3 min 20 s left"), (1000.0, "3 min 20 s left")]
)
def test_time_left_is_that_of_the_nearer_limit(
    seconds: float | None, left: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second of training took two on the clock, because of evaluations: the rest will too."""
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    lines = ProgressLines()
    lines.least = 0.0
    lines.on_start(limited(seconds))
    clock[0] = 120.0
    lines.on_step(replace(after(182, 10.0), metric=0.5))
    assert capsys.readouterr().err.endswith(f"{left}\n")


def test_a_line_is_there_before_the_run_starts_and_disappears() -> None:
    shown = io.StringIO()
    bar = ProgressBar(Console(file=shown, force_terminal=True, width=60))
    bar.on_waiting("starting 2 workers for mnist-cnn ...")
    assert "starting 2 workers for mnist-cnn ..." in shown.getvalue()
    before = len(shown.getvalue())
    bar.on_start(start(2, None))
    assert "\x1b[2K" in shown.getvalue()[before:].split("mnist-cnn · ")[0], "erased, then the headline"
    bar.close()


def test_without_a_terminal_there_is_no_such_line(capsys: pytest.CaptureFixture[str]) -> None:
    """In a file or a pipe nobody waits, and bad input is answered in one line."""
    ProgressLines().on_waiting("starting 2 workers for mnist-cnn ...")
    assert capsys.readouterr().err == ""


def test_what_a_strategy_changed_is_a_line_of_the_headline() -> None:
    changed = replace(start(2, None), recipe_changes="momentum 0 instead of 0.9")
    assert len(headline(changed)) == len(headline(start(2, None))) + 1
    assert "allreduce changes the recipe: momentum 0 instead of 0.9 (" in headline(changed)[2]
