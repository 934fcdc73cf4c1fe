"""Runs and studies of an earlier version (tests/old): they are shown, reported, loaded and resumed."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import manyhands as mh
from conftest import Answer
from manyhands.engine.checkpoint.storage import Checkpoints, load
from manyhands.records import renames
from manyhands.records.record import RunRecord
from manyhands.records.run_folder import RunFolder
from manyhands.report.notebook import StudyResults

OLD = Path(__file__).parents[1] / "old"
EXPECTED = json.loads((OLD / "expected.json").read_text())


def facts(record: RunRecord) -> dict[str, Any]:
    """The numbers that are in expected.json, as this version reads them."""
    times = record.worker_step_times
    assert times is not None
    timeline: Counter[str] = Counter()
    for span in (span for spans in record.timeline for span in spans):
        timeline[span.phase] += span.end - span.begin  # type: ignore[assignment]
    return {
        **{name: getattr(record, name) for name in ("steps", "samples", "metric", "throughput")},
        **{name: getattr(record, name) for name in ("training_seconds", "target_seconds")},
        **{name: getattr(record, name) for name in ("mean_staleness", "machine_noise", "worker_phases")},
        "step_times": times.model_dump(exclude={"synchronized_steps"}),
        "timeline": {phase: pytest.approx(seconds, abs=1e-9) for phase, seconds in timeline.items()},
    }


def test_a_run_is_loaded_with_the_same_numbers() -> None:
    record = mh.load(OLD / "server")
    assert isinstance(record, RunRecord)
    assert facts(record) == EXPECTED["server"]
    assert record.phases[0]["optimizer"] > 0  # the server's
    assert all("optimiser" not in phases for phases in record.phases)


def test_steps_are_read_with_the_same_numbers() -> None:
    steps = RunFolder(OLD / "server").steps()
    seconds: Counter[str] = Counter()
    for step in steps:
        seconds.update(step.phases)  # type: ignore[arg-type]
    assert len(steps) == EXPECTED["server_steps"]["count"]
    assert dict(seconds) == EXPECTED["server_steps"]["phases"]


def test_a_run_is_shown(typed: Callable[..., Answer]) -> None:
    answer = typed("show", str(OLD / "server"))
    assert answer.code == 0, answer.err
    assert "digits-mlp · run f4a65f91605d · finished" in answer.out
    assert "staleness" in answer.out
    shown = json.loads(typed("show", str(OLD / "server"), "--json").out)
    assert shown["step_times"][1]["median"] == EXPECTED["server"]["step_times"]["median"]
    unfinished = typed("show", str(OLD / "allreduce"))
    assert "not finished, stopped after step 20" in unfinished.out


def test_a_study_is_loaded_with_the_same_numbers() -> None:
    study = mh.load(OLD / "study")
    assert isinstance(study, StudyResults)
    assert {Path(record.run).name: facts(record) for record in study.records} == EXPECTED["study"]
    assert {Path(record.run).name: facts(record) for record in study.results.repeated} == EXPECTED["repeated"]
    assert [each.seconds for each in study.results.calibrations] == EXPECTED["calibrations"]


def test_a_study_is_reported(typed: Callable[..., Answer], tmp_path: Path) -> None:
    answer = typed("report", str(OLD / "study"), "--out", str(tmp_path / "page"), "--no-pictures")
    assert answer.code == 0, answer.err
    page = (tmp_path / "page/report.html").read_text()
    assert "optimiser" not in page
    assert "optimizer" in page


def test_a_killed_run_is_resumed_to_the_same_parameters(typed: Callable[..., Answer], tmp_path: Path) -> None:
    """In float64 with a tolerance, because another processor may sum in another order."""
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(OLD / "allreduce", folder.path)
    (saved,) = Checkpoints(folder.checkpoints, "").paths()
    clock = load(saved, frozenset({folder.spec().id})).state["clock"]
    assert "optimiser" not in clock
    answer = typed("train", "--resume", str(folder.path), "--trust", "--quiet")
    assert answer.code == 0, answer.err
    expected, found = load_file(OLD / "resumed.safetensors"), load_file(folder.model)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11)
    assert [step.step for step in folder.steps()] == list(range(1, 49))
    record = folder.record()
    assert record is not None
    assert record.resumed == 1
    assert record.phases[0]["optimizer"] > clock["optimizer"] > 0  # the time before the kill counts
    assert set(record.phases[0]) == set(clock)


def test_names_keep_their_order_and_the_current_one_counts() -> None:
    step: dict[str, Any] = {"step": 1, "phases": {"wait": 1.0, "optimiser": 2.0, "other": 3.0}}
    assert renames.update("step", step)
    assert list(step["phases"].items()) == [("wait", 1.0), ("optimizer", 2.0), ("other", 3.0)]
    assert not renames.update("step", step)
    both: dict[str, Any] = {"phases": {"optimiser": 1.0, "optimizer": 2.0}}
    assert renames.update("step", both)
    assert both == {"phases": {"optimizer": 2.0}}


@pytest.mark.parametrize(
    "fields",
    [None, [], 3, {"phases": 1}, {"phases": [None, [], {}]}, {"timeline": [[[]], 1, [2]], "pace": 0}],
)
def test_a_damaged_file_is_left_to_its_schema(fields: Any) -> None:
    for file in renames.RENAMES:
        renames.update(file, fields)


def test_options_of_a_user_are_not_renamed() -> None:
    """A task of the user's own may have an option called `pace` or `optimiser`."""
    fields: dict[str, Any] = {"spec": {"options": {"pace": 1, "optimiser": "x"}}, "recipe": {"pace": math.pi}}
    assert not renames.update("record", fields)
