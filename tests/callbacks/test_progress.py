"""What a person sees of several workers: efficiency where it is known, and the share of the exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manyhands.callbacks.progress import ProgressLines, efficiency
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
