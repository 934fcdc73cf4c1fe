"""Learning curves: loss and metric by samples and by seconds."""

from __future__ import annotations

import math
from itertools import product

import altair as alt

from manyhands.analysis import groups
from manyhands.analysis.crossing import crossing
from manyhands.core import formatting
from manyhands.records.record import Evaluation, RunRecord
from manyhands.report.charts import common, sureness
from manyhands.report.figure import RECORDS, Figure, Panel, Row, limited, tidy
from manyhands.report.findings import Findings

MOST_RUNS, MOST_POINTS, MOST_TASKS = 24, 60, 3


def figure(findings: Findings) -> Figure | None:
    """Up to four panels per task: metric and loss, by samples and by seconds; one line per run."""
    panels, sentences, left = [], [], 0
    for task in findings.tasks[:MOST_TASKS]:
        mine = groups.of_task(findings.records, task)
        drawn = _chosen(findings, task, mine)
        left += len(mine) - len(drawn)
        if drawn:
            sentences.append(_sentence(findings, task, drawn))
            panels += _panels(findings, task, drawn, sentences[-1])
    return Figure(common.sentence(sentences), panels, limited(left, "run", RECORDS)) if panels else None


def _chosen(findings: Findings, task: str, records: list[RunRecord]) -> list[RunRecord]:
    """One run per strategy and worker count, preferably with a curve, timed, and at the most common batch."""
    batch = findings.shown_batch(task)
    found: dict[tuple[str, int, int], RunRecord] = {}

    def rank(record: RunRecord) -> tuple[bool, bool, bool, int, int]:
        return (
            len(record.curve) < 3,
            not record.timed,
            record.spec.batch != batch,
            record.spec.seed,
            record.repeat,
        )

    for record in sorted(records, key=rank):
        if len(record.curve) >= 2:
            key = groups.variant(record), record.spec.workers, record.environment.threads
            found.setdefault(key, record)
    return list(found.values())[:MOST_RUNS]


def thin(points: list[Evaluation], most: int) -> list[Evaluation]:
    """At most `most` points, evenly spaced, with the first and the last."""
    if len(points) <= most:
        return points
    stride = (len(points) - 1) / (most - 1)
    return [points[round(k * stride)] for k in range(most)]


def _rows(record: RunRecord) -> list[Row]:
    return [
        {
            "variant": groups.variant(record),
            "title": groups.title(record),
            "line": _line(record),
            "samples": point.samples,
            "seconds": tidy(point.seconds),
            "metric": tidy(point.metric),
            "loss": tidy(point.test_loss if point.test_loss is not None else point.loss),
            "run": common.short(record.run),
        }
        for point in thin(record.curve, MOST_POINTS)
    ]


def _line(record: RunRecord) -> str:
    """What the dashes of a line mean: `2 workers`, `1 worker x 2 threads`."""
    threads = groups.threads(record)
    more = f" x {threads} threads" if threads > 1 else ""
    return formatting.plural(record.spec.workers, "worker") + more


def _both_losses(record: RunRecord) -> list[Row]:
    """Training loss next to test loss, for a single run."""
    points = thin(record.curve, MOST_POINTS)
    return [
        {**row, "line": line, "loss": tidy(value)}
        for line in ("test", "training")
        for row, point in zip(_rows(record), points, strict=True)
        if (value := point.test_loss if line == "test" else point.loss) is not None
    ]


def _panels(findings: Findings, task: str, drawn: list[RunRecord], text: str) -> list[Panel]:
    data = [row for record in drawn for row in _rows(record)]
    name = drawn[0].metric_name
    panels = []
    timed = all(record.timed for record in drawn)
    for measure, by in product(("metric", "loss"), ("samples", "seconds") if timed else ("samples",)):
        known = [row for row in data if row[measure] is not None]
        if findings.run and measure == "loss":
            known = _both_losses(findings.run)
        if not known:
            continue
        what = f"test {name}" if measure == "metric" else "loss" if findings.run else "test loss"
        title = f"{task} · {what} by {'time' if by == 'seconds' else by}"
        note = ""
        if measure == "metric":
            note = f"Dashed, across: the target, {formatting.threshold(drawn[0].target, name)}."
        view = _view(findings, known, drawn[0], measure, by)
        rows: dict[str, list[Row]] = {"rows": known, "target": [{"target": drawn[0].target}]}
        panels.append(Panel(title, view, rows, f"{title}. {text}", note=note))
    return panels


def _dashes(data: list[Row]) -> alt.StrokeDash:
    """Dashes by number of workers and threads, or by kind of loss."""
    lines = sorted({str(row["line"]) for row in data}, key=lambda line: (len(line), line))
    dashes = [[1, 0], [5, 3], [2, 2], [8, 3, 2, 3], [1, 4]]
    key = alt.Legend(symbolType="stroke", orient="bottom", direction="horizontal", symbolSize=300)
    return alt.StrokeDash(
        "line:N",
        title=None,
        scale=alt.Scale(domain=lines, range=[dashes[k % len(dashes)] for k in range(len(lines))]),
        legend=key if len(lines) > 1 else None,
    )


def _view(findings: Findings, data: list[Row], record: RunRecord, measure: str, by: str) -> alt.LayerChart:
    name = record.metric_name
    percent = measure == "metric" and name == "accuracy"
    values = sorted(float(row[measure]) for row in data)
    spread = measure == "loss" and values[0] > 0
    # clip early points far below: they would squeeze all others, near the target, into the upper edge
    floor = values[len(values) // 12] if percent else None
    scale = (
        alt.Scale(type="log", nice=False, padding=6)
        if spread
        else alt.Scale(
            zero=False, clamp=True, padding=8, domainMin=floor if floor is not None else alt.Undefined
        )
    )
    y = alt.Y(
        f"{measure}:Q",
        title=f"test {name}" if measure == "metric" else "loss" if findings.run else "test loss",
        scale=scale,
        axis=alt.Axis(format=".0%" if percent else "~g", tickCount=5),
    )
    x = common.many("samples seen", "samples")
    if by == "seconds":
        x = alt.X("seconds:Q", title="training time", axis=common.time_axis())
    dash = _dashes(data)
    base = common.rows().encode(x=x, y=y, color=common.color(findings.looks, data), detail="run:N")
    tip = common.tips(
        ("title:N", "run"),
        ("samples:Q", "samples", ",d"),
        ("seconds:Q", "seconds", ".2f"),
        ("metric:Q", name, ".2%" if name == "accuracy" else ".4g"),
        ("loss:Q", "loss", ".4g"),
        common.RUN,
    )
    layers: list[alt.Chart] = [
        base.mark_line(strokeWidth=1.6, strokeOpacity=0.9).encode(strokeDash=dash),
        base.mark_point(size=70, opacity=0).encode(tooltip=tip),  # invisible, carries the tooltip
    ]
    if measure == "metric":
        layers.insert(0, common.rows("target").encode(y="target:Q").mark_rule(style="guide"))
    return common.layered(*layers)


def _distance(record: RunRecord) -> float:
    """The distance of the best metric from the target, in either direction."""
    return abs(record.best_metric - record.target) if record.best_metric is not None else math.inf


def _sentence(findings: Findings, task: str, drawn: list[RunRecord]) -> str:
    """How many of the runs reached the target; who is first is said by the answer, and only there."""
    arrived = [record for record in drawn if groups.succeeded(record)]
    name, count = drawn[0].metric_name, formatting.plural(len(drawn), "run")
    target = formatting.threshold(drawn[0].target, name)
    if not arrived:
        best = min(drawn, key=_distance)
        none = "the run did not reach" if len(drawn) == 1 else f"none of the {count} drawn here reached"
        return (
            f"{task}: {none} {target}; the nearest is {groups.title(best)} "
            f"with {formatting.score(best.best_metric, name)}."
        )
    if len(drawn) == 1:
        return f"{task}: {groups.title(drawn[0])} reached {target} {_after(drawn[0])}."
    text = f"{task}: {len(arrived)} of the {count} drawn here reached {target}"
    won = {sureness.cell_key(each) for each in findings.winners(task)}
    first = [record for record in arrived if groups.key(record) in won]
    if not first:
        return text + "."
    return f"{text}; {groups.title(first[0])}, among the fastest of the study, {_after(first[0])}."


def _after(record: RunRecord) -> str:
    """`after 102,400 images and 7.9 s of training`."""
    found = crossing(record)
    if found is None:
        return "at an unknown time"
    seen = formatting.count(round(found.samples), record.unit)
    if not record.timed or not found.seconds:
        return f"after {seen}"
    return f"after {seen} and {common.brief_time(found.seconds)} of training"
