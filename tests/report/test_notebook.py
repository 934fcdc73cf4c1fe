"""`manyhands.load` and `manyhands report`: results read back without torch, in a notebook or a shell."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import manyhands as mh
from conftest import Answer
from manyhands.core.errors import UsageError
from manyhands.records.record import RunRecord
from manyhands.records.run_folder import RunFolder
from manyhands.report.notebook import StudyResults
from manyhands.testing.records import record


def runs() -> list[RunRecord]:
    return [
        record(rate=10_000, batch=256),
        record(rate=19_000, batch=256, strategy="allreduce", workers=2),
        record(rate=17_000, batch=256, strategy="allreduce", workers=4),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Any folder of runs: a study without a journal."""
    for made in runs():
        run = RunFolder(tmp_path / "runs" / made.spec.name)
        run.create()
        run.write_spec(made.spec)
        run.write_record(made.model_copy(update={"run": str(run.path)}))
    return tmp_path / "runs"


def test_a_run_gives_its_record(folder: Path) -> None:
    made = runs()[0]
    found = mh.load(folder / made.spec.name)
    assert isinstance(found, RunRecord)
    assert found.samples_per_second == 10_000


def test_a_study_gives_records_a_frame_answers_and_charts(folder: Path) -> None:
    study = mh.load(folder)
    assert isinstance(study, StudyResults)
    assert len(study.records) == 3
    frame = study.frame()
    assert frame.shape[0] == 3
    assert frame.set_index("workers")["speed_up"].round(2).to_dict() == {1: 1.0, 2: 1.9, 4: 1.7}
    assert "speed-up" in study.charts
    assert "allreduce" in study.answers[0]
    shown = study.chart("speed-up")
    assert any(
        key.startswith("application/vnd.vegalite") or key == "text/html" for key in shown._repr_mimebundle_()
    )
    assert repr(study) == "StudyResults('runs', 3 runs)"
    html = study._repr_html_()
    assert "allreduce" in html
    assert "speed-up" in html


def test_a_slip_in_a_chart_s_name(folder: Path) -> None:
    study = mh.load(folder)
    assert isinstance(study, StudyResults)
    with pytest.raises(
        UsageError, match=r"^unknown chart 'speedup' \(did you mean 'speed-up'\? known: answer, "
    ):
        study.chart("speedup")
    with pytest.raises(
        UsageError, match=r"^runs has no numbers for the chart 'staleness' \(it has: answer, "
    ):
        study.chart("staleness")


def test_without_pandas_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    study = mh.load(folder)
    assert isinstance(study, StudyResults)
    with pytest.raises(UsageError, match=r"^a data frame needs pandas: pip install 'manyhands\[notebook\]'$"):
        study.frame()


def test_what_is_neither_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"nowhere is not a run folder \(spec.json: no such file or directory\)$"
    ):
        mh.load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"is not a run folder \(spec.json: no such file or directory\)$"):
        mh.load(tmp_path)


def test_a_report_is_drawn_again(folder: Path) -> None:
    study = mh.load(folder)
    assert isinstance(study, StudyResults)
    assert study.report(folder / "page") == folder / "page" / "report.html"


def test_the_verb_draws_without_torch(folder: Path) -> None:
    code = (
        "import sys; from manyhands.cli import answer; code = answer(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("answer: for mnist-mlp on this machine train with allreduce, 2 workers")
    assert lines[-1] == f"report: {folder / 'report.html'}"
    assert (folder / "charts" / "speed-up.png").is_file()
    assert (folder / "results.csv").is_file()


def test_the_verb_answers_in_json(folder: Path, typed: Callable[..., Answer]) -> None:
    answer = typed("report", str(folder), "--out", "page", "--no-pictures", "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["report"] == "page/report.html"
    assert found["answers"].keys() == {"mnist-mlp"}
    assert not (folder / "charts").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["."], ". holds no study and no runs with a result"),
    ],
)
def test_bad_input_is_one_sentence(typed: Callable[..., Answer], words: list[str], sentence: str) -> None:
    answer = typed("report", *words)
    assert (answer.code, answer.out, answer.err) == (2, "", f"error: {sentence}\n")


def test_help_has_an_example(manyhands: Callable[..., Answer]) -> None:
    answer = manyhands("report", "--help")
    assert answer.code == 0
    assert "manyhands report results/default" in answer.out
