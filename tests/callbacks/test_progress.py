"""What a person sees of several workers: efficiency where it is known, and the share of the exchange."""

from __future__ import annotations

import pytest

from manyhands.callbacks.progress import ProgressLines, efficiency
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
        (OneWorker(160.0, 2), "1.20x 1 worker of 2 threads"),
    ],
)
def test_efficiency_is_against_a_worker_with_as_many_threads(one: OneWorker | None, text: str) -> None:
    assert efficiency(start(2, one), 192.0) == text


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
