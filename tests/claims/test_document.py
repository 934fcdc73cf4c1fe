"""The page about all claims, and the verb that lists, runs and writes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from claims import test_claims as claims
from conftest import Answer
from manyhands.claims import CLAIMS
from manyhands.cli import claims as verb
from manyhands.cli.claims import QUICK, first_answer
from manyhands.core.errors import UsageError
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Cell, Results, StudyFolder
from manyhands.report import claims_document
from manyhands.report.charts.claim_plots import figure
from manyhands.report.claims_document import Judged, document
from manyhands.study import study_file

SMALL = """
name = "averaging"
claim = "averaging"
[defaults]
task = "digits-mlp"
timed = false
threads = 1
epochs = 1
strategy = "average"
workers = 2
[[grid]]
seed = [0, 1]
strategy_options.every = [1, 4, "end"]
"""


def written(folder: Path, claim: str, records: list[RunRecord], left: int = 0) -> None:
    """A study's folder as a study leaves it."""
    rates = [{"lr": record.recipe["lr"]} for record in records]
    specs = [record.spec.replace(recipe_options=rate) for record, rate in zip(records, rates, strict=True)]
    cells = [Cell(spec, timed=False) for spec in specs]
    with StudyFolder(folder).writing() as journal:
        asked = [*cells, *(Cell(cells[0].spec.replace(seed=90 + number)) for number in range(left))]
        journal.write("study", name=claim, title=claim, claim=claim, cells=[cell.to_json() for cell in asked])
        for cell, record in zip(cells, records, strict=True):
            run = folder / cell.key
            run.mkdir(parents=True)
            (run / "spec.json").write_text(cell.spec.model_dump_json())
            changed = record.model_copy(update={"spec": cell.spec, "id": cell.spec.id})
            (run / "result.json").write_text(changed.model_dump_json())
            journal.write("finished", cell=cell.key, run=cell.key)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    written(tmp_path / "averaging", "averaging", claims.TestAveraging().runs(), left=2)
    written(tmp_path / "asynchrony", "asynchrony", claims.TestAsynchrony().runs(cost=0.0))
    return tmp_path


class TestDocument:
    def test_it_is_written_from_the_records(self, results: Path) -> None:
        page = results / "docs" / "claims.md"
        page.parent.mkdir()
        claims_document.write(claims_document.judged(results), page)
        text = page.read_text()
        assert "**holds here** | 9 runs (2 not done) | `manyhands claims run averaging`" in text
        assert "Measured on 2026-11-16 on 2 cores of a processor" in text
        assert "| at least 1.0 points | holds |" in text
        assert "**Not settled.**" in text, "asynchrony, with no effect"
        assert text.count("**Not run yet**") == len(CLAIMS) - 2
        for picture in re.findall(r"\]\((claims/[^)]+)\)", text):
            assert (page.parent / picture).read_text().startswith("<svg")
        assert "](claims/averaging.svg)" in text

    def test_every_row_of_a_table_has_the_same_cells(self, results: Path) -> None:
        text = document(claims_document.judged(results), {})
        for table in re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE):
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(widths) == 1, table

    def test_without_results_it_says_so(self, tmp_path: Path) -> None:
        text = document(claims_document.judged(tmp_path), {})
        assert "No study has been run yet." in text
        assert text.count("not run yet") == len(CLAIMS)

    def test_the_study_of_another_claim_is_refused(self, tmp_path: Path) -> None:
        written(tmp_path / "offload", "averaging", claims.TestAveraging().runs())
        with pytest.raises(UsageError, match="is not the study of the claim offload"):
            claims_document.judged(tmp_path)

    def test_a_bar_in_a_name_does_not_end_a_cell(self) -> None:
        claim = CLAIMS["averaging"]._replace(statement="a | b")
        finding = claim.judge(Results(Path("x"), "x", "x", records=claims.TestAveraging().runs()))
        text = document([Judged(claim, Results(Path("x"), "x", "x"), finding)], {})
        assert "a \\| b" in text


class TestPicture:
    def test_every_series_is_drawn(self) -> None:
        finding = CLAIMS["asynchrony"].judge(
            Results(Path("x"), "x", "x", records=claims.TestAsynchrony().runs())
        )
        picture = figure(finding)
        assert picture is not None
        rows = picture.panels[0].data["rows"]
        assert {row["line"] for row in rows} == {"plain", "rates divided by the staleness"}
        assert [row["x"] for row in rows if row["line"] == "plain"] == [0, 3, 7, 15]
        assert all(row["low"] <= row["y"] <= row["high"] for row in rows)


class TestVerb:
    def test_the_list_has_every_claim_and_its_verdict(
        self, results: Path, typed: Callable[..., Answer]
    ) -> None:
        answer = typed("claims", "--from", str(results))
        assert answer.code == 0
        assert "averaging       holds here" in answer.out
        assert "large-batch     not run yet (about" in answer.out

    def test_write(self, results: Path, typed: Callable[..., Answer]) -> None:
        answer = typed("claims", "write", "--from", str(results), "--to", str(results / "page.md"))
        assert answer.code == 0
        assert answer.out.endswith("2 of 8 claims with results\n")
        assert (results / "page" / "asynchrony.svg").is_file()

    def test_nothing_to_write_is_refused(self, tmp_path: Path, typed: Callable[..., Answer]) -> None:
        answer = typed("claims", "write", "--from", str(tmp_path), "--to", str(tmp_path / "page.md"))
        assert answer.code == 2
        assert "holds no results of a claim" in answer.err
        assert not (tmp_path / "page.md").exists()

    def test_a_slip_is_guessed(self, typed: Callable[..., Answer]) -> None:
        answer = typed("claims", "run", "lage-batch")
        assert answer.code == 2
        assert "unknown claim 'lage-batch' (did you mean 'large-batch'? known:" in answer.err

    @pytest.mark.slow
    def test_run_decides_and_quick_leaves_the_rest_for_later(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Callable[..., Answer]
    ) -> None:
        """A study file of the same name in ./studies replaces ours."""
        monkeypatch.chdir(tmp_path)
        Path("studies").mkdir()
        Path("studies/averaging.toml").write_text(SMALL)
        monkeypatch.setattr(verb, "QUICK", 1e-6)
        first = typed("claims", "run", "averaging", "--out", "found", "--quick", "--quiet")
        assert first.code == 0, first.err
        assert "5 cells left: `manyhands claims run averaging` continues" in first.out
        whole = typed("claims", "run", "averaging", "--out", "found", "--quiet")
        assert whole.code == 0, whole.err
        assert "left" not in whole.out
        assert "digits-mlp, 2 workers: " in whole.out
        assert "Not settled: " in whole.out, "two seeds refute nothing"
        assert "averaging       not settled" in typed("claims", "--from", "found").out

    def test_quick_runs_whole_seeds_first_within_minutes(self) -> None:
        plan = study_file.read(study_file.find("asynchrony"))
        first = first_answer(plan)
        seeds = [cell.spec.seed for cell in first.cells]
        assert seeds == sorted(seeds)
        assert sorted(seeds) != [cell.spec.seed for cell in plan.cells]
        assert first.budget == QUICK
