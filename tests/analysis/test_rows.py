"""Records as flat rows."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from manyhands.analysis.rows import columns, rows
from manyhands.records.record import Noise, RunRecord
from manyhands.records.study_results import Results
from manyhands.testing.records import record

PROMISED = [
    *(
        "task",
        "variant",
        "strategy",
        "workers",
        "threads",
        "batch",
        "recipe",
        "lr",
        "seed",
        "repeat",
        "status",
    ),
    *("throughput", "speed_up", "efficiency", "target_seconds", "target_steps", "target_samples", "metric"),
    *("step_seconds", "phase_data", "phase_forward", "phase_backward", "phase_communication", "phase_wait"),
    *("phase_optimizer", "phase_other", "bytes_per_step", "memory", "staleness", "noise_scale"),
    *("machine_noise", "verdict", "run"),
]


def study(*records: RunRecord, price: float | None = None) -> Results:
    return Results(Path("results/test"), "test", "A test", records=list(records), price=price)


def gang(**fields: object) -> RunRecord:
    return record(**({"strategy": "allreduce", "workers": 2, "batch": 256, "rate": 19_000.0} | fields))


def test_every_row_has_the_promised_columns():
    made = rows(study(record(), gang(), record(status="diverged", steps_to_target=None)))
    assert all(list(row) == columns(made) for row in made)
    assert set(PROMISED) <= set(columns(made))


def test_a_row_says_what_a_run_did():
    noise = Noise(small=64, big=128, gradient=2.0, spread=100.0, steps=9)
    run = gang(noise=noise, staleness={1: 1, 2: 1}, machine_noise=0.03, seed=7, repeat=2)
    row = rows(study(record(rate=10_000.0), run, price=3.6))[1]
    expected = {
        "task": "mnist-mlp",
        "variant": "allreduce",
        "workers": 2,
        "threads": 1,
        "batch": 256,
        "recipe": "linear + warm-up",
        "lr": 0.1,
        "seed": 7,
        "repeat": 2,
        "throughput": 19_000.0,
        "baseline": "one worker, one thread",
        "baseline_batch": 128,
        "speed_up": 1.9,
        "efficiency": 0.95,
        "target_steps": 400,
        "target_samples": 102_400,
        "target_seconds": pytest.approx(400 * 256 / 19_000),
        "step_seconds": pytest.approx(256 / 19_000),
        "phase_backward": pytest.approx(0.6 * 256 / 19_000),
        "bytes_per_step": 7.5e6,
        "memory": 400_000_000,
        "staleness": 1.5,
        "noise_scale": 50.0,
        "machine_noise": 0.03,
        "verdict": "near the limit",
        "money": pytest.approx(2 * 703 * 256 / 19_000 / 1000),
        "run": run.run,
    }
    assert {name: row[name] for name in expected} == expected


def test_a_run_without_the_machine_has_no_seconds_but_its_steps():
    row = rows(study(record(), gang(timed=False)))[1]
    assert [row[name] for name in ("throughput", "speed_up", "target_seconds", "worker_seconds")] == [
        None
    ] * 4
    assert row["target_steps"] == 400


def test_a_run_that_diverged_reached_nothing():
    row = rows(study(record(status="diverged")))[0]
    assert (row["reached"], row["target_steps"], row["target_seconds"]) == (False, None, None)
    assert row["verdict"] == "diverged"


def test_rows_go_into_a_csv():
    made = rows(study(record(), gang()))
    file = io.StringIO()
    writer = csv.DictWriter(file, columns(made))
    writer.writeheader()
    writer.writerows(made)
    back = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert [row["workers"] for row in back] == ["1", "2"]
    assert all(isinstance(value, str | int | float | bool | None) for row in made for value in row.values())


def test_nothing_gives_nothing():
    assert rows(study()) == []
    assert columns([]) == []
