"""A study: cells from a file, finished ones never again, failures reported, the rest goes on."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from children import Child
from conftest import ROOT, Answer
from manyhands.errors import UsageError
from manyhands.study import grid

STUDY = """
name = "small"
[[grid]]
task = "quadratic"
batch = [50, 100]
epochs = 2
seed = [0, 1]
"""


def test_lists_become_cells(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(STUDY)
    study = grid.read(tmp_path / "s.toml")
    assert study.name == "small"
    assert [(cell.batch, cell.seed) for cell in study.cells] == [(50, 0), (50, 1), (100, 0), (100, 1)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name = 'x'", "has no cells: it needs at least one [[grid]]"),
        ("[[grid]]\ntask = 'quadratic'\nbatch = []", "has no cells: it needs at least one [[grid]]"),
        ("[[grid]\n", "is not TOML: "),
        ("[[grid]]\nbatch = 3", "a run needs a task"),
        ("[[grid]]\ntask = 'quadratik'", "unknown task 'quadratik' (did you mean 'quadratic'? known: "),
    ],
)
def test_a_bad_file_is_answered_before_anything_runs(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        grid.read(tmp_path / "s.toml")
    assert sentence in str(caught.value)


def test_the_table_and_the_answer(tmp_path: Path, typed: Callable[..., Answer]) -> None:
    (tmp_path / "s.toml").write_text(STUDY)
    answer = typed("study", "s.toml", "-q")
    assert answer.code == 0
    lines = answer.out.strip().splitlines()
    assert lines[0].split() == [
        "task",
        "strategy",
        "workers",
        "batch",
        "samples/s",
        "to",
        "target",
        "samples",
        "at",
        "the",
        "end",
    ]
    assert len(lines) == 6
    assert lines[-1].startswith("answer: quadratic: ")
    folders = sorted(path.name for path in (tmp_path / "results/small").iterdir())
    assert len(folders) == 4


def test_finished_cells_are_not_run_again(tmp_path: Path, typed: Callable[..., Answer]) -> None:
    (tmp_path / "s.toml").write_text(STUDY)
    first = json.loads(typed("study", "s.toml", "-q", "--json").out)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("results/small/*/result.json")}
    victim = next(iter(stamps))
    victim.unlink()
    again = json.loads(typed("study", "s.toml", "-q", "--json").out)
    assert [cell["metric"] for cell in again] == [cell["metric"] for cell in first]
    changed = [path for path, stamp in stamps.items() if path.stat().st_mtime_ns != stamp]
    assert changed == [victim]


def test_a_failed_cell_does_not_stop_the_rest(tmp_path: Path, typed: Callable[..., Answer]) -> None:
    (tmp_path / "s.toml").write_text("[[grid]]\ntask = 'digits-mlp'\nepochs = 1\nbatch = [5000, 50]\n")
    answer = typed("study", "s.toml")
    assert answer.code == 1
    assert "failed: batch 5,000 is larger than the 1,437 training samples of digits-mlp" in answer.err
    rows = answer.out.strip().splitlines()
    assert rows[1].split()[4] == "failed"
    assert rows[2].split()[3] == "50"


def test_a_cell_that_diverges_is_a_result(tmp_path: Path, typed: Callable[..., Answer]) -> None:
    (tmp_path / "s.toml").write_text(
        "[[grid]]\ntask = 'quadratic'\nepochs = 1\nrecipe_options = [{lr = 1e30}, {lr = 0.2}]\n"
    )
    answer = typed("study", "s.toml")
    assert answer.code == 0, answer.err
    rows = answer.out.strip().splitlines()
    assert rows[1].split()[5] == "diverged"
    assert "the loss became inf at step 2" in answer.err
    again = typed("study", "s.toml")
    assert again.out == answer.out
    assert "step 2" not in again.err, "it is not run again"


def test_where_the_data_cannot_be_had_the_fallback_is_used(
    tmp_path: Path, typed: Callable[..., Answer]
) -> None:
    (tmp_path / "s.toml").write_text(
        "fallback = 'digits-mlp'\n[[grid]]\ntask = 'mnist-mlp'\nepochs = 1\nbatch = [50, 100]\n"
    )
    blocked = {
        "MANYHANDS_CACHE": str(tmp_path / "cache"),
        "PATH": "/nowhere",
        "https_proxy": "http://127.0.0.1:9",
    }
    answer = typed("study", "s.toml", **blocked)
    assert answer.code == 0, answer.err
    assert "using digits-mlp instead of mnist-mlp" in answer.err
    assert answer.err.count("cannot get mnist") == 1
    assert [row.split()[0] for row in answer.out.strip().splitlines()[1:3]] == ["digits-mlp"] * 2


def test_the_default_study_is_valid() -> None:
    assert {cell.task for cell in grid.read(ROOT / "studies/default.toml").cells} == {
        "mnist-mlp",
        "mnist-cnn",
    }


def test_an_interrupted_study_goes_on_with_the_same_command(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        "[[grid]]\ntask = 'quadratic'\nepochs = [2, 100000]\nsamples = 3000000\n"
    )
    child = Child("study", "s.toml", folder=tmp_path)
    child.wait_until(lambda: len(list(tmp_path.glob("results/s/*/steps.jsonl"))) == 2)
    time.sleep(0.3)
    child.send(signal.SIGINT)
    assert child.end() == 130, child.said
    expected = "error: interrupted in cell 2; give the same command to go on with the study"
    assert child.said.strip().splitlines()[-1] == expected
