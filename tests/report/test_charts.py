"""Charts are numbers first: what is drawn, what is left out, and what the sentence says of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from manyhands.records.record import Evaluation, Span
from manyhands.records.study_results import Calibration, Results
from manyhands.report import palette, repeat
from manyhands.report.charts import (
    CHARTS,
    best,
    learning,
    machine,
    pairs,
    regimes,
    scaling,
    step,
    target,
    timeline,
)
from manyhands.report.figure import altair_chart, fitting_columns, limited, tidy
from manyhands.report.findings import Findings
from manyhands.testing.records import record
from report.samples import many, paired, pipelined, rich


@pytest.fixture(scope="module")
def findings() -> Findings:
    return Findings(rich(Path("results/default"), repeats=2))


@pytest.fixture(scope="module")
def rounds() -> Findings:
    return Findings(paired(Path("results/paired")))


def of(*records: object, **fields: object) -> Findings:
    return Findings(Results(Path("x"), "x", "x", records=list(records), **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_every_chart_is_valid_told_and_small(chart: object, findings: Findings, rounds: Findings) -> None:
    study = rounds if chart.name == "how-sure" else findings  # type: ignore[attr-defined]
    figure = chart.figure(study)  # type: ignore[attr-defined]
    assert figure is not None
    spec = altair_chart(figure, "heading").to_dict()  # against the schema
    assert len(spec["concat"]) == len(figure.panels)
    for line in figure.sentence.splitlines():
        assert re.search(r"\d", line), "a sentence about these results has a number in it"
        assert line.endswith(".")
    for panel in figure.panels:
        assert panel.data["rows"]
        assert len(panel.text) > 40
        assert sum(len(rows) for rows in panel.data.values()) < 3_000
        known = set().union(*(row.keys() for rows in panel.data.values() for row in rows))
        wanted = set(re.findall(r"'field': '(\w+)'", str(panel.chart().to_dict())))
        assert wanted <= known | {"middle"}, "everything that is drawn is there"


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_one_run_alone_is_no_reason_to_fail(chart: object) -> None:
    figure = chart.figure(of(record(steps_to_target=None)))  # type: ignore[attr-defined]
    if figure is not None:
        altair_chart(figure).to_dict()


ODD = {
    "diverged": {"status": "diverged", "metric": None, "best_metric": None, "loss": None},
    "no curve": {"curve": []},
    "a curve without numbers": {
        "curve": [
            Evaluation(step=k, samples=k, seconds=0.0, loss=None, metric=None, test_loss=None)
            for k in (1, 2, 3)
        ]
    },
    "no step times": {"step_times": [None, None], "steady_samples_per_second": None},
    "no memory": {"memory": [], "peak_memory": 0},
    "a lost rank": {"phases": [{}, {"forward": 1.0}], "timeline": [[], [Span("forward", 0.0, 1.0)]]},
    "no time at all": {"seconds": 0.0, "training_seconds": 0.0, "timeline": [[Span("other", 0.0, 0.0)]]},
    "interrupted": {"status": "interrupted", "timed": False},
    "another metric": {"metric_name": "loss", "metric": 1e-9, "best_metric": 1e-9, "target": 1e-6},
    "fresh only": {"staleness": {0: 10}},
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_records_are_drawn_too(odd: str) -> None:
    strange = record(strategy="allreduce", workers=2).model_copy(update=ODD[odd] | {"run": "strange"})
    for findings in (of(strange), of(record(), strange, record(strategy="server", workers=2, batch=64))):
        for chart in CHARTS:
            if (figure := chart.figure(findings)) is not None:
                altair_chart(figure).to_dict(validate=False)


def test_names_are_the_address_of_a_chart() -> None:
    names = [chart.name for chart in CHARTS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z-]+", name) for name in names)


def test_nothing_to_show_is_none() -> None:
    alone = of(record())
    assert scaling.figure(alone) is None
    assert regimes.figure(alone) is None
    assert regimes.noise(alone) is None
    assert step.communication(alone) is None
    assert timeline.figure(alone) is None
    assert machine.figure(alone) is None


def test_the_speed_up_names_its_baseline() -> None:
    runs = [
        record(rate=10_000, batch=256),
        record(rate=14_000, batch=256, threads=2),
        record(rate=19_000, batch=256, strategy="allreduce", workers=2),
        record(rate=17_000, batch=256, strategy="allreduce", workers=4),
    ]
    figure = scaling.figure(of(*runs))
    assert figure is not None
    assert figure.sentence.splitlines()[0] == (
        "mnist-mlp · batch 256: by samples per second, allreduce with 2 workers, allreduce with 4 workers "
        "and single with 2 threads are the fastest, and not told apart; the first is 1.90x (1.39 to 2.60) as "
        "fast as one worker with one thread."
    )
    assert figure.panels[0].data["threads"][0]["speed_up"] == 1.4
    assert "Dotted: one worker with 2 threads, 1.40x." in figure.panels[0].note
    assert "1 run can be trusted" in figure.panels[0].note, "one run has no interval of its own"


def test_a_target_that_nobody_reached_is_a_dash_or_no_map() -> None:
    never = [record(steps_to_target=None, batch=batch) for batch in (64, 128)]
    assert target.figure(of(*never)) is None
    figure = target.figure(of(never[0], record(batch=128, steps_to_target=300)))
    assert figure is not None
    labels = {row["batch"]: (row["label"], row["shown"]) for row in figure.panels[0].data["rows"]}
    assert labels[64] == ("–", "not reached")
    assert labels[128] == ("3.8 s ●", "3.8 s")


@pytest.mark.parametrize(
    ("critical", "sentence"),
    [
        (
            400,
            r"the critical batch is \d+ \(\d+ to [\d,]+\); doubling the batch nearly halves the steps up to ",
        ),
        (
            8,
            r"the critical batch is .*; from batch 32, the smallest that was run, doubling the batch does",
        ),
        (
            40_000,
            r"up to batch 1,024, the largest that reached the target, doubling the batch nearly halves the ",
        ),
    ],
)
def test_regimes_are_told_as_far_as_batches_were_run(critical: int, sentence: str) -> None:
    batches = (32, 64, 128, 256, 512, 1024)
    runs = [
        record(batch=batch, steps_to_target=round(100 * (1 + critical / batch)), epochs=90.0)
        for batch in batches
    ]
    figure = regimes.figure(of(*runs))
    assert figure is not None
    assert re.search(sentence, figure.sentence), figure.sentence


def test_the_largest_loss_is_named() -> None:
    phases = {"forward": 0.004, "backward": 0.006, "communication": 0.01}
    figure = step.breakdown(of(record(strategy="allreduce", workers=2, phases=phases)))
    assert figure is not None
    assert figure.sentence == (
        "mnist-mlp: allreduce with 2 workers spends 50 % of its step on communication."
    )
    shares = {row["phase"]: row["share"] for row in figure.panels[0].data["rows"]}
    assert shares == {"forward": 0.2, "backward": 0.3, "communication": 0.5}


def test_micro_batches_are_counted() -> None:
    made = record(strategy="pipeline", workers=2, timeline=pipelined(2, 3))
    rows = timeline.spans(made)
    first = [(row["phase"], row["number"]) for row in rows if row["rank"] == "stage 0"]
    assert [number for phase, number in first if phase == "forward"] == ["1", "2", "3"]
    assert [number for phase, number in first if phase == "backward"] == ["1", "2", "3"]
    assert {number for phase, number in first if phase == "wait"} == {""}


def test_idle_time_is_what_is_neither_work_nor_waiting() -> None:
    line = [Span("forward", 0.0, 1.0), Span("wait", 1.0, 4.0), Span("backward", 4.0, 5.0)]
    assert timeline.busy(record(timeline=[line])) == [pytest.approx(0.4)]


def test_curves_are_thinned_to_their_ends() -> None:
    points = [
        Evaluation(step=k, samples=k, seconds=k, loss=1, metric=1, test_loss=1) for k in range(1, 1_001)
    ]
    kept = learning.thin(points, 60)
    assert len(kept) == 60
    assert (kept[0].step, kept[-1].step) == (1, 1_000)


def test_of_very_many_runs_some_are_drawn_and_the_others_counted() -> None:
    figure = learning.figure(Findings(many(Path("x"), 400)))
    assert figure is not None
    assert re.fullmatch(
        r"3\d\d further runs are not drawn; all are in the runs' result.json.", figure.left_out
    )
    assert limited(1, "run") == "1 further run is not drawn; all are in results.csv."
    assert limited(0, "run") == ""


def test_a_quiet_machine_and_a_noisy_one() -> None:
    times = [Calibration(f"2026-11-16T10:0{k}:00+00:00", s) for k, s in enumerate((0.2, 0.21, 0.25))]
    noisy, quiet = machine.figure(of(calibrations=times)), machine.figure(of(calibrations=times[:2]))
    assert noisy is not None
    assert quiet is not None
    assert "1 of 3 calibrations found it noisy" in noisy.sentence
    assert "none of 2 calibrations found it noisy" in quiet.sentence
    assert [row["state"] for row in noisy.panels[0].data["rows"]] == ["quiet", "quiet", "noisy"]


def test_looks_stay_apart() -> None:
    names = ["single", *(f"way {k}" for k in range(14))]
    looks = palette.looks(names)
    assert looks["single"].color == palette.NEUTRAL
    assert len({(look.color, look.shape) for look in looks.values()}) == len(names)
    assert len({look.shape for look in list(looks.values())[:7]}) >= 6, "not by color alone"


def test_numbers_are_short() -> None:
    assert tidy(1 / 3) == 0.33333
    assert tidy(float("nan")) is None
    assert tidy(None) is None


def test_a_run_is_repeated_by_its_command() -> None:
    made = record(
        strategy="average", strategy_options={"every": 8}, workers=2, batch=256, options={"width": 2}, seed=3
    )
    assert repeat.train(made) == (
        "manyhands train mnist-mlp --strategy average --workers 2 --batch 256 --threads 1 "
        "--recipe large-batch --epochs 3 --target 0.97 --seed 3 --set width=2 --set strategy.every=8"
    )


def test_what_was_measured_in_blocks_is_repeated_with_a_length() -> None:
    """A page once told people to train for 10,000 epochs: that is how a run in blocks is started."""
    made = record(threads=2, epochs=10_000.0, paired=True)
    command = "manyhands train mnist-mlp --batch 128 --threads 2 --recipe large-batch"
    assert repeat.train(made) == command
    assert repeat.train(made, record(seed=2)) == f"{command} --epochs 3 --target 0.97"


def test_runs_that_were_not_timed_have_no_curves_by_seconds() -> None:
    timed, aside = record(), record(batch=256, timed=False)
    by_time = [panel.title for panel in learning.figure(of(timed)).panels if "by time" in panel.title]
    assert len(by_time) == 2
    drawn = learning.figure(of(aside))
    assert not [panel.title for panel in drawn.panels if "by time" in panel.title]
    assert drawn.sentence == ("mnist-mlp: single · 1 thread · batch 256 reached 97 % after 102,400 images.")


@pytest.mark.parametrize("sent", [0.3, 7.5e6])
def test_hardly_any_bytes_are_not_drawn(sent: float) -> None:
    """The bar of a barrier's four bytes was as long as the chart, at 0.000004 megabytes."""
    traffic = [{"barrier": {"calls": 1.0, "bytes": sent * 703, "seconds": 0.1}}] * 2
    other = [{"send": {"calls": 1.0, "bytes": 7.5e6 * 703, "seconds": 0.1}}] * 2
    two = [
        record(strategy=name, workers=2, batch=256, epochs=3.0, traffic=each)
        for name, each in (("hogwild", traffic), ("allreduce", other))
    ]
    panel = step.communication(of(*two)).panels[0]
    drawn = {row["title"] for row in panel.data["rows"]}
    assert ("hogwild · 2 workers" in drawn) == (sent > 1)
    assert ("not drawn: hogwild · 2 workers" in panel.note) == (sent < 1)
    assert (step.communication(of(two[0])) is None) == (sent < 1)


def test_workers_that_do_not_step_together_start_together() -> None:
    """The second worker was traced 25 ms later: its steps were slivers in an empty chart."""
    lines = [[Span("forward", 0.0, 0.001)], [Span("forward", 0.025, 0.027)]]
    free, together = (record(strategy=name, workers=2, timeline=lines) for name in ("hogwild", "allreduce"))
    assert [row["begin"] for row in timeline.spans(free)] == [0, 0]
    assert [row["begin"] for row in timeline.spans(together)] == [0, 25], "there a late start is a fact"
    assert "each row starts at its own first step" in timeline.figure(of(free)).panels[0].note
    assert timeline.figure(of(together)).panels[0].note == ""


def test_lines_of_one_worker_with_more_threads_are_dashed() -> None:
    drawn = learning.figure(of(record(), record(threads=2)))
    lines = {(row["variant"], row["line"]) for row in drawn.panels[0].data["rows"]}
    assert lines == {("single", "1 worker"), ("single", "1 worker x 2 threads")}


def test_the_noise_axis_begins_below_the_best_moment() -> None:
    times = [Calibration(f"2026-11-16T10:0{k}:00+00:00", s) for k, s in enumerate((0.2, 0.2, 0.2, 0.15, 0.3))]
    panel = machine.figure(of(calibrations=times)).panels[0]
    low, high = panel.view.to_dict()["layer"][-1]["encoding"]["y"]["scale"]["domain"]
    seen = [row["slower"] for row in panel.data["rows"]]
    assert low < min(seen) < 0 < max(seen) < high


def test_names_of_rows_are_whole_and_different() -> None:
    """Two pipelines looked alike where the ends of their names were cut off."""
    two = [
        record(strategy="pipeline", workers=2, strategy_options={"micro_batches": count}, rate=1e4 + count)
        for count in (4, 8)
    ]
    for figure in (best.figure(of(record(), *two)), step.breakdown(of(record(), *two))):
        titles = {row["title"] for row in figure.panels[0].data["rows"]}
        assert len(titles) == 3
        assert all("1 thread" in title or "2 workers" in title for title in titles), "two what?"


def test_legends_of_pictures_fit() -> None:
    names = [f"pipeline micro_batches={count}" for count in (2, 4, 8, 16, 32, 64, 96)]
    assert fitting_columns(names, 420) == 2
    assert fitting_columns(["a", "b", "c"], 420) == 3
    assert fitting_columns(["a" * 100, "b"], 420) == 1


def test_paired_rounds_tell_how_sure(rounds: Findings) -> None:
    figure = pairs.figure(rounds)
    panel = figure.panels[0]
    cells = {row["title"]: row for row in panel.data["rows"]}
    assert len(cells) == 9
    assert len(panel.data["dots"]) == 9 * 6
    leading = {title for title, row in cells.items() if row["label"].endswith("●")}
    assert leading == {
        f"{variant} · 2 workers · batch 128" for variant in ("allreduce", "average", "average every=4")
    }
    for row in cells.values():
        assert row["low"] < row["ratio"] < row["high"]
        assert row["interval"].endswith("from 6 paired rounds")
    assert "95 % intervals from 6 paired rounds" in panel.note
    assert "are the fastest, and not told apart" in figure.sentence
    assert pairs.figure(of(record())) is None, "a study without blocks has none of it"


def test_a_machine_that_drifts_leaves_ratios_alone(rounds: Findings) -> None:
    """Blocks vary by 20 %, ratios by the noise of two blocks."""
    figure = pairs.figure(rounds)
    assert max(row["spread"] for row in figure.panels[0].data["rows"]) < 0.06
