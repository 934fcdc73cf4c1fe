"""`manyhands report RUN` draws one run: its curves, phases, timeline and memory, without a comparison."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Answer
from manyhands.core.errors import UsageError
from manyhands.records.record import RunRecord
from manyhands.records.run_folder import RunFolder
from manyhands.report import page as pages
from manyhands.report import sources
from manyhands.report.findings import Findings
from manyhands.report.headline import headlines
from manyhands.report.page import draw
from manyhands.testing.records import record
from report.samples import pipelined


def written(path: Path, made: RunRecord, *, ended: bool = True) -> Path:
    folder = RunFolder(path)
    folder.create()
    folder.write_spec(made.spec)
    if ended:
        folder.write_record(made.model_copy(update={"run": "elsewhere"}))
    return path


@pytest.fixture
def run(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pages, "_vega", lambda: "")
    made = record(strategy="pipeline", workers=2, timeline=pipelined(2, 3))
    return written(Path("runs/first"), made)


@pytest.mark.parametrize("folder", ["runs/first", "runs"])
def test_the_page_of_a_run(run: Path, folder: str, typed: Callable[..., Answer]) -> None:
    answer = typed("report", folder, "--no-pictures")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("run: mnist-mlp with pipeline · 2 workers · batch 128 reached 97 % after ")
    assert answer.out.splitlines()[-1] == f"report: {folder}/report.html"
    text = Path(folder, "report.html").read_text()
    for name in ("curves", "breakdown", "timeline", "memory"):
        assert f'data-chart="{name}"' in text, name
    assert text.index('data-chart="curves"') < text.index('data-chart="breakdown"')
    assert "<h1>mnist-mlp · pipeline · 2 workers · batch 128</h1>" in text
    assert "manyhands · run" in text
    for absent in ("nothing to compare", "All runs", 'id="missing"', 'class="filter"', 'data-chart="answer"'):
        assert absent not in text, absent
    assert "manyhands train mnist-mlp --strategy pipeline" in text


def test_links_lead_to_the_run_itself(run: Path) -> None:
    text = draw(sources.read(run), pictures=False).read_text()
    assert 'href="./result.json"' in text


def test_its_answer_in_json(run: Path, typed: Callable[..., Answer]) -> None:
    answer = typed("report", str(run), "--no-pictures", "--json")
    assert list(json.loads(answer.out)["answers"]) == ["mnist-mlp"]


def test_a_run_without_a_result_is_continued_first(here: Path) -> None:
    path = written(Path("runs/unfinished"), record(), ended=False)
    with pytest.raises(
        UsageError,
        match=r"^runs/unfinished has no result yet; continue it with: manyhands train --resume runs/unfin",
    ):
        sources.read(path)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (record(), "reached 97 % after 51,200 images"),
        (record(steps_to_target=None), "did not reach 97 % (best: 90.00 %) in 179,968 images"),
        (record(status="diverged", metric=None), "diverged after 179,968 images"),
        (record(steps_to_target=None).model_copy(update={"best_metric": None}), "was not evaluated in "),
    ],
    ids=["reached", "missed", "diverged", "not evaluated"],
)
def test_what_became_of_the_run(made: RunRecord, said: str) -> None:
    results = sources.Results(Path("x"), "x", "x", records=[made])
    (found,) = headlines(Findings(results))
    assert said in found.leading[0]
    assert "without a comparison" in found.text


def test_training_loss_is_next_to_test_loss(run: Path) -> None:
    from manyhands.report.charts import learning

    figure = learning.figure(Findings(sources.read(run)))
    losses = [panel for panel in figure.panels if "loss" in panel.title]
    assert {row["line"] for row in losses[0].data["rows"]} == {"test", "training"}
