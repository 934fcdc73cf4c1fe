"""Ids have twelve digits: two specs with one id are refused, and an older version's eight go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import safetensors
import safetensors.torch

import manyhands
from manyhands.core.errors import CheckpointError, UsageError
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec, same_id
from manyhands.records.study_results import StudyFolder
from manyhands.study import calibration, study_file
from manyhands.study.execute import execute
from manyhands.study.study_file import Study
from manyhands.study.view import NoView

pytestmark = pytest.mark.usefixtures("one_core")
train = partial(manyhands.train, "quadratic", batch=100, quiet=True)
TWO = "[[grid]]\ntask = 'quadratic'\nepochs = 1\nbatch = [50, 100]\ncheckpoint_every = 0\n"


def test_an_old_id_is_the_beginning_of_a_new_one() -> None:
    assert same_id("b162fe15", "b162fe154483")
    assert same_id("b162fe154483", "b162fe15")
    assert same_id("b162fe154483", "b162fe154483")
    assert not same_id("b162fe154484", "b162fe154483")
    assert not same_id("b162fe16", "b162fe154483")
    assert not same_id("", "b162fe154483"), "what says nothing is no id"
    assert not same_id("b162", "b162fe154483")


def test_two_cells_with_one_id_are_refused(
    study: Callable[[str], Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them was dropped without a word: with 8 digits and 10,000 cells, once in a hundred studies."""
    monkeypatch.setattr(RunSpec, "id", "000000000000")
    with pytest.raises(
        UsageError,
        match=r"^two different cells \(batch 50 -> 100\) have the same id 000000000000: change any setting "
        r"of one of them, such as its seed$",
    ):
        study(TWO)


def test_cells_that_differ_in_nothing_that_counts_are_one(study: Callable[[str], Study]) -> None:
    assert len(study(TWO.replace("= 0", "= [0, 60]")).cells) == 2


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Study]:
    """Write a study file and read it; the machine is quiet."""
    monkeypatch.setattr(calibration, "measure", lambda: 0.03)

    def write(text: str) -> Study:
        (tmp_path / "s.toml").write_text(text)
        return study_file.read(tmp_path / "s.toml")

    return write


def age(folder: RunFolder) -> Path:
    """Make a run as version 0.1.0 left it: 8 digits in its name and its checkpoints."""
    old = folder.spec().id[:8]
    for path in folder.checkpoints.iterdir():
        with safetensors.safe_open(path, framework="pt") as opened:
            metadata = {**opened.metadata(), "run": old}
        path.write_bytes(safetensors.torch.save(safetensors.torch.load_file(path), metadata))
    path = folder.path.with_name(folder.path.name.replace(folder.spec().id, old))
    record = folder.path / "result.json"
    fields = {**json.loads(record.read_text()), "id": old, "run": f"runs/{path.name}"}
    record.write_text(json.dumps(fields))
    return folder.path.rename(path)


def test_a_run_with_an_old_id_goes_on(here: Path) -> None:
    whole = train(epochs=2)
    first = train(epochs=2, samples=600)
    old = age(RunFolder(here / first.run))
    assert old.name == f"quadratic-{first.id[:8]}"
    found = train(epochs=2, samples=600, resume=True)
    assert found.run == str(old.relative_to(here)), "by its settings"
    assert len(found.id) == 8, "it was finished, and its record is as it was"
    longer = manyhands.train(str(old), quiet=True, resume=True, samples=2000, allow_changes=True)
    assert (longer.resumed, longer.steps, longer.metric) == (1, 20, whole.metric)


def test_a_checkpoint_of_another_run_is_still_refused(here: Path) -> None:
    first = train(epochs=1)
    folder = RunFolder(here / first.run)
    for path in folder.checkpoints.iterdir():
        with safetensors.safe_open(path, framework="pt") as opened:
            metadata = {**opened.metadata(), "run": "00000000"}
        path.write_bytes(safetensors.torch.save(safetensors.torch.load_file(path), metadata))
    with pytest.raises(CheckpointError, match=r" belongs to another run \(00000000\); none of the 1"):
        manyhands.train(first.run, quiet=True, resume=True, samples=900, allow_changes=True)


def test_a_study_with_old_ids_goes_on(here: Path, study: Callable[[str], Study]) -> None:
    """One cell is finished and one was stopped: neither begins anew."""
    plan, out = study(TWO), here / "out"
    done = execute(plan, out, NoView())
    text = (out / "journal.jsonl").read_text()
    for cell in plan.cells:
        text = text.replace(cell.key, cell.old_key)
        (out / cell.key).rename(out / cell.old_key)
    *lines, last = text.splitlines(keepends=True)
    assert '"finished"' in last
    (out / "journal.jsonl").write_text("".join(lines))  # stopped before the last cell was journalled
    (out / plan.cells[1].old_key / "mark").touch()
    again = execute(plan, out, NoView())
    assert [record.metric for record in again.records] == [record.metric for record in done.records]
    assert [Path(record.run).name for record in again.records] == [cell.old_key for cell in plan.cells]
    assert (out / plan.cells[1].old_key / "mark").exists()
    assert [path.name for path in out.iterdir() if path.name in {cell.key for cell in plan.cells}] == []
    ran = [event["cell"] for event in StudyFolder(out).events() if event["event"] == "started"]
    assert ran == [plan.cells[0].key, plan.cells[1].key, plan.cells[1].key]
