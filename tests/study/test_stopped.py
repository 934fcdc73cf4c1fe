"""A study that is killed, interrupted or torn goes on where it was, and comes to the same."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from children import Child
from manyhands.records.study_results import StudyFolder
from manyhands.study import execute
from manyhands.study.study_file import Study
from manyhands.study.view import NoView

STUDY = """
name = "s"
[defaults]
task = "quadratic"
epochs = 10
checkpoint_every = 0.1
threads = 1
[[grid]]
batch = [50, 100]
seed = [0, 1, 2]
timed = false
[[grid]]
task = "digits-mlp"
epochs = 2
[[grid]]
workers = 2
epochs = 5
timed = false
"""


def test_killed_three_times_it_has_the_same_cells(tmp_path: Path, study: Callable[[str], Study]) -> None:
    moments = random.Random(time.time_ns())
    out = StudyFolder(tmp_path / "results/s")
    for _ in range(3):
        lines = len(out.events())
        child = Child("study", "s.toml", "-q", "--no-report", folder=_with(tmp_path))
        least = lines + moments.randint(2, 5)
        child.wait_until(lambda least=least: len(out.events()) >= least)
        time.sleep(moments.uniform(0, 0.3))
        child.kill()
    child = Child("study", "s.toml", "-q", "--no-report", folder=tmp_path)
    assert child.end() == 0, child.output
    killed = out.read()
    whole = execute.execute(study(STUDY), tmp_path / "whole", NoView())
    assert (killed.failed, killed.left, len(killed.records)) == ([], [], 8)
    assert [(record.id, record.metric, record.steps) for record in killed.records] == [
        (record.id, record.metric, record.steps) for record in whole.records
    ]
    finished = Counter(event["cell"] for event in out.events() if event["event"] == "finished")
    assert set(finished.values()) == {1}, "each is finished once"
    assert len(finished) == 8


def _with(folder: Path) -> Path:
    (folder / "s.toml").write_text(STUDY)
    return folder


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupted_study_goes_on_with_the_same_command(tmp_path: Path, jobs: int) -> None:
    (tmp_path / "s.toml").write_text(
        "[[grid]]\ntask = 'quadratic'\nepochs = [2, 100000]\nsamples = 30000000\ntimed = false\n"
    )
    child = Child("study", "s.toml", "--jobs", str(jobs), folder=tmp_path)
    child.wait_until(lambda: len(list(tmp_path.glob("results/s/*/steps.jsonl"))) == 2)
    child.wait_until(lambda: " at the end" in child.output)
    began = time.monotonic()
    child.send(signal.SIGINT)
    assert child.end() == 130, child.output
    assert time.monotonic() - began < 10
    expected = "error: interrupted after 1 of 2 cells; run the same command to continue the study"
    assert child.output.strip().splitlines()[-1] == expected


def test_a_torn_last_line_is_mended(here: Path, study: Callable[[str], Study]) -> None:
    text = "[[grid]]\ntask = 'quadratic'\nepochs = 1\nseed = [0, 1]\n"
    out = StudyFolder(here / "out")
    first = execute.execute(study(text), out.path, NoView())
    whole = out.journal.read_bytes()
    torn = whole[: whole.rindex(b'"finished"') + 5]  # in the middle of the last result
    out.journal.write_bytes(torn)
    assert [len(found) for found in (out.read().records, out.read().left)] == [1, 1]
    second = execute.execute(study(text), out.path, NoView())
    assert [record.metric for record in second.records] == [record.metric for record in first.records]
    assert len([event for event in out.events() if event["event"] == "finished"]) == 2
    assert second.left == []
