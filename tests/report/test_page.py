"""The page as a file: what it holds, what it must not hold, how large it is and how long it takes."""

from __future__ import annotations

import csv
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from manyhands.claims import Claim, Finding, Settled
from manyhands.core.errors import StorageError, UsageError
from manyhands.records.study_results import Results
from manyhands.report import page as pages
from manyhands.report.charts import CHARTS
from manyhands.report.page import draw
from manyhands.testing.records import record
from report.samples import many, rich


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the whole report."""
    return draw(rich(tmp_path_factory.mktemp("study"), repeats=2)).parent


def data(page: Path) -> dict[str, list[object]]:
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL
    )
    assert found is not None
    read: dict[str, list[object]] = json.loads(found[1])
    return read


def test_everything_is_written(study: Path) -> None:
    names = {chart.name for chart in CHARTS} - {"how-sure"}  # nothing was measured in pairs
    assert {path.stem for path in (study / "charts").glob("*.png")} == names
    assert {path.stem for path in (study / "charts").glob("*.svg")} == names
    for path in (study / "charts").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    with (study / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(rich(study, repeats=2).records)
    assert {"task", "variant", "workers", "batch", "throughput", "speed_up", "run"} <= rows[0].keys()


def test_no_address_is_in_the_page_but_vegas_own(study: Path) -> None:
    text = re.sub(r"<script>.*?</script>", "", (study / "report.html").read_text(), flags=re.DOTALL)
    assert "http://" not in text
    assert "https://" not in text
    assert "connect-src" not in text
    assert "default-src 'none'" in text
    assert set(re.findall(r'(?:src|href)="([^"#]+?)"', text)) & {"results.csv", "charts/answer.svg"}


def test_answers_failures_machine_and_commands_are_there(study: Path) -> None:
    text = (study / "report.html").read_text()
    for words in (
        "For mnist-mlp on this machine train with",
        "SIGKILL, often: out of memory",
        "fewer than 8 stages",
        "the budget of 5 minutes was spent",
        "measured under heavy noise, and repeated",
        "a processor",
        "manyhands study default",
        "manyhands train mnist-mlp",
        f"manyhands report {study}",
    ):
        assert words.lower() in text.lower(), words


def test_every_run_is_a_row_with_a_way_to_it(study: Path) -> None:
    text = (study / "report.html").read_text()
    ways = re.findall(r'<td><a href="([^"]+)" title="mnist-\w+-[0-9a-f]{12}">[0-9a-f]{12}</a></td>', text)
    assert len(ways) == len(rich(study, repeats=2).records)
    assert all(way.endswith("/result.json") for way in ways)


def test_hostile_words_stay_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = '</script><script>alert("1")</script><img src=x onerror=alert(1)>'
    runs = [record(), record(strategy="average", workers=2, strategy_options={"outer": evil})]
    found = Settled(
        Claim(evil, evil, evil, lambda _: Finding(None, [])), Finding(None, [evil], [{evil: evil}])
    )
    monkeypatch.setattr(pages, "settle", lambda _: [found])
    page = draw(Results(tmp_path, evil, evil, about=evil, records=runs), pictures=False)
    text = page.read_text()
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert data(page)["panels"]


@pytest.mark.parametrize(("holds", "kind"), [(True, "holds"), (False, "fails"), (None, "open")])
def test_a_claim_stands_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: bool | None, kind: str
) -> None:
    finding = Finding(holds, ["With 3 numbers"], [{"batch": 64, "share": 0.123456}])
    claim = Claim("doubling", "Batches double.", "Somebody 2018", lambda _: finding)
    monkeypatch.setattr(pages, "settle", lambda _: [Settled(claim, finding)])
    text = draw(Results(tmp_path, "x", "x", records=[record()]), pictures=False).read_text()
    assert text.index(f'class="claim {kind}"') < text.index('class="answer"')
    assert f"{finding.verdict[0].upper()}{finding.verdict[1:]}</p>" in text
    assert "<cite>Somebody 2018</cite>" in text
    assert "0.1235" in text


def test_a_single_run_makes_a_page(tmp_path: Path) -> None:
    page = draw(Results(tmp_path, "one", "One run", records=[record(steps_to_target=None)]))
    text = page.read_text()
    assert "One run" in text
    assert 'class="filter"' not in text, "nothing to choose from"


def test_a_study_that_was_not_timed_opens_with_what_it_has(tmp_path: Path) -> None:
    runs = [
        record(batch=b, steps_to_target=round(100 * (1 + 90 / b)), timed=False) for b in (32, 64, 128, 256)
    ]
    text = draw(Results(tmp_path, "x", "x", records=runs), pictures=False).read_text()
    answer = text[text.index('class="answer"') : text.index('class="contents"')]
    assert 'data-chart="steps-to-target"' in answer
    assert "critical batch" in answer


def test_what_nobody_reached_is_said(tmp_path: Path) -> None:
    runs = [record(steps_to_target=None, batch=batch) for batch in (64, 128)]
    text = draw(Results(tmp_path, "x", "x", records=runs), pictures=False).read_text()
    assert "no cell reached 97\u00a0%" in text, "no line break before the sign"


def test_a_study_without_a_run_has_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no run with a result yet, so there is nothing to report$"):
        draw(Results(tmp_path, "x", "x"))


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"^cannot write .*file"):
        draw(Results(tmp_path, "x", "x", records=[record()]), tmp_path / "file")


def test_old_charts_do_not_stay_behind(tmp_path: Path) -> None:
    (tmp_path / "charts").mkdir()
    for name in ("speed-up.svg", "mine.svg"):
        (tmp_path / "charts" / name).write_text("from before")
    draw(Results(tmp_path, "x", "x", records=[record()]))
    left = {path.name for path in (tmp_path / "charts").iterdir()}
    assert "speed-up.svg" not in left, "one worker has no speed-up to show"
    assert "mine.svg" in left, "what is not ours is left alone"


@pytest.mark.parametrize(
    ("count", "pictures"), [(1_200, False), pytest.param(2_000, True, marks=pytest.mark.soak)]
)
def test_many_runs_are_drawn_in_time_and_small(tmp_path: Path, count: int, pictures: bool) -> None:
    results = many(tmp_path, count)
    assert len({made.run for made in results.records}) == count
    began = time.process_time()
    page = draw(results, pictures=pictures)
    assert (
        time.process_time() - began < 30
    )  # of two threads: the 20 s of wall clock, on a shared machine
    assert page.stat().st_size < 5e6
    text = page.read_text()
    assert f"The first 1,000 of {count:,} runs" in text
    assert "further runs are not drawn" in text


def test_it_is_drawn_elsewhere_with_links_that_lead_back(tmp_path: Path) -> None:
    runs = [record(run=str(tmp_path / "study" / "run-1"))]
    results = replace(Results(tmp_path / "study", "x", "x"), records=runs)
    page = draw(results, tmp_path / "page", pictures=False)
    assert page == tmp_path / "page" / "report.html"
    assert 'href="./../study/run-1/result.json"' in page.read_text()
    assert not (tmp_path / "page" / "charts").exists()


@pytest.mark.parametrize(("timed", "words"), [(True, "of timed runs"), (False, "nothing was timed")])
def test_the_head_says_whether_times_count(tmp_path: Path, timed: bool, words: str) -> None:
    runs = [record(timed=timed), record(timed=timed, batch=64)]
    page = draw(Results(tmp_path, "x", "x", records=runs), pictures=False)
    assert words in page.read_text()
