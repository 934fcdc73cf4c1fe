"""One winner, told in one way in every section: charts, captions and the answer have the same cells."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from manyhands.analysis.groups import variant
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results
from manyhands.report.charts import best, learning, pairs, scaling, sureness, target
from manyhands.report.findings import Findings
from manyhands.testing.records import record
from report.samples import paired, rich


def of(*records: RunRecord) -> Findings:
    return Findings(Results(Path("x"), "x", "x", records=list(records)))


def test_the_same_cells_are_marked_everywhere() -> None:
    findings = Findings(rich(Path("x"), repeats=2))
    won = findings.winners("mnist-mlp")
    assert len(won) > 1, "a study with winners that are not told apart"
    cells = {(each.variant, each.workers, each.batch) for each in won}
    rows = target.figure(findings).panels[0].data["rows"]
    assert {(row["variant"], row["workers"], row["batch"]) for row in rows if row["winner"]} == cells
    bars = best.figure(findings).panels[0].data["rows"]
    marked = {row["title"] for row in bars if row["label"].endswith(sureness.TIED)}
    names = {f"{name} · {workers} workers · batch {batch}" for name, workers, batch in cells}
    assert marked
    assert marked <= names
    first = target.figure(findings).sentence.splitlines()[0]
    assert "are the fastest, and not told apart" in first
    for each in won[: sureness.MOST_NAMED]:
        assert f"{each.variant} with {each.workers} workers at batch {each.batch}" in first


def test_a_lucky_run_is_no_second_winner() -> None:
    """R3: `Time to the target` named the fastest cell, `Learning curves` the fastest single run."""
    average = [
        record(strategy="average", workers=2, rate=rate, run=f"average-{k}", seed=k)
        for k, rate in enumerate((19_000, 20_000, 20_500))
    ]
    lucky = record(strategy="pipeline", workers=2, rate=30_000, run="lucky", seed=0)
    slow = [record(strategy="pipeline", workers=2, rate=8_000, run=f"slow-{k}", seed=k) for k in range(1, 9)]
    findings = of(record(rate=10_000), *average, lucky, *slow)
    assert [each.variant for each in findings.winners("mnist-mlp")] == ["average"]
    told = learning.figure(findings).sentence
    assert "average · 2 workers" in told
    assert "pipeline" not in told
    assert "average with 2 workers" in target.figure(findings).sentence
    assert target.figure(findings).sentence.startswith("mnist-mlp: average with 2 workers")


def test_what_diverged_is_no_bar_and_no_winner() -> None:
    """A cell that reached the target once and diverged once is not advised, so it must not look first."""
    wild = [
        record(strategy="hogwild", workers=2, rate=40_000, run="well"),
        record(strategy="hogwild", workers=2, rate=40_000, run="wild", seed=1, status="diverged"),
    ]
    findings = of(record(rate=10_000), record(rate=19_000, strategy="allreduce", workers=2), *wild)
    assert [each.variant for each in findings.winners("mnist-mlp")] == ["allreduce"]
    (bars,) = best.figure(findings).panels
    assert {row["variant"] for row in bars.data["rows"]} == {"single", "allreduce"}
    (heat,) = target.figure(findings).panels
    told = {row["variant"]: (row["label"], row["shown"]) for row in heat.data["rows"]}
    assert told["hogwild"] == ("×", "diverged in 1 of 2 runs")


def test_speeds_that_are_not_told_apart_are_ringed_together() -> None:
    base = record(rate=10_000)
    close = [
        record(strategy="allreduce", workers=2, rate=19_000),
        record(strategy="average", workers=2, rate=19_500),
    ]
    far = record(strategy="server", workers=2, rate=11_000)
    panel = scaling.figure(of(base, *close, far)).panels[0]
    ringed = {row["variant"] for row in panel.data["rows"] if row["winner"]}
    assert ringed == {"allreduce", "average"}
    assert "not told apart" in panel.note
    alone = scaling.figure(of(base, close[0], far)).panels[0]
    assert {row["variant"] for row in alone.data["rows"] if row["winner"]} == {"allreduce"}
    assert "Ringed: the fastest." in alone.note


def test_paired_rounds_decide_where_there_are_some() -> None:
    """Speeds have wide intervals on a machine that drifts; ratios by round are narrow."""
    findings = Findings(paired(Path("x")))
    fastest = findings.fastest(findings.points["mnist-mlp"])
    names = {each.variant for each in fastest}
    assert names == {"allreduce", "average", "average every=4"}
    (lane,) = findings.lanes
    assert {variant(findings.by_cell[cell]) for cell in findings.lane_leaders(lane)} == names
    ringed = {row["variant"] for row in scaling.figure(findings).panels[0].data["rows"] if row["winner"]}
    assert ringed == names
    dots = {row["variant"] for row in pairs.figure(findings).panels[0].data["rows"] if "●" in row["label"]}
    assert dots == names


def test_nothing_faster_than_the_baseline_is_said() -> None:
    results = paired(Path("x"))
    slower = {f"{block.cell}": block for block in results.blocks}
    base = results.blocks[0].cell
    blocks = [
        block if block.cell == base else block._replace(samples_per_second=block.samples_per_second / 4)
        for block in results.blocks
    ]
    assert len(slower) == 10
    figure = pairs.figure(Findings(Results(Path("x"), "x", "x", records=results.records, blocks=blocks)))
    assert figure.sentence.startswith("mnist-mlp: nothing is faster than single with 1 thread")
    assert not any("●" in row["label"] for row in figure.panels[0].data["rows"])


@pytest.mark.parametrize(
    ("hows", "note"),
    [
        (["1 run"], "Thin lines: how far 1 run can be trusted, from the usual noise of a machine."),
        (["3 runs", "3 runs"], "Thin lines: 95 % intervals from 3 runs."),
        (["5 paired rounds", "8 paired rounds"], "Thin lines: 95 % intervals from 5 to 8 paired rounds."),
        (
            ["1 run", "3 runs"],
            "Thin lines: 95 % intervals from 3 runs; where there is 1 run, from the usual noise of a "
            "machine.",
        ),
        (
            ["1 seed x 6 paired rounds", "3 seeds x 8 paired rounds"],
            "Thin lines: 95 % intervals from 1 to 3 seeds x 6 to 8 paired rounds.",
        ),
        (
            ["3 runs", "6 paired rounds"],
            "Thin lines: 95 % intervals from 3 runs or 6 paired rounds.",
        ),
        ([], ""),
    ],
)
def test_an_interval_says_what_it_is_from(hows: list[str], note: str) -> None:
    assert sureness.intervals_note(hows) == note


def test_one_run_never_has_the_95_percent_interval() -> None:
    figure = best.figure(of(record(rate=10_000), record(rate=20_000, strategy="allreduce", workers=2)))
    (panel,) = figure.panels
    assert "95 %" not in panel.note
    for row in panel.data["rows"]:
        assert re.search(r"from 1 run and the usual noise of a machine$", row["interval"])


def test_nobody_calls_a_machine_quiet_that_varied() -> None:
    """A page said `on a quiet machine` below an answer with `the machine varied by 12 %`."""
    from manyhands.report import sections

    html = sections.missing(Findings(paired(Path("x"))))
    assert "Nothing is missing: every cell of this study ran to its end." in html
    assert "While pairs were measured, the machine varied by 7 % (mnist-mlp); the intervals include" in html
    assert "quiet" not in html
    busy = sections.missing(Findings(paired(Path("x"), noise=0.3)))
    assert "That is much: close what else runs, and measure again." in busy
    assert "quiet" not in sections.missing(of(record()))
    assert "The machine was quiet." in sections.missing(of(record(machine_noise=0.03), record(batch=256)))
