"""Learning curves: loss and metric by samples and by seconds."""

from __future__ import annotations

import math
from itertools import product

import altair as alt

from manyhands.analysis import groups
from manyhands.analysis.crossing import Crossing, crossing
from manyhands.core import formatting
from manyhands.records.record import Evaluation, RunRecord
from manyhands.report.charts import common
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
            sentences.append(_sentence(task, drawn))
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
            "workers": record.spec.workers,
            "samples": point.samples,
            "seconds": tidy(point.seconds),
            "metric": tidy(point.metric),
            "loss": tidy(point.test_loss if point.test_loss is not None else point.loss),
            "run": common.short(record.run),
            "timed": record.timed,
        }
        for point in thin(record.curve, MOST_POINTS)
    ]


def _panels(findings: Findings, task: str, drawn: list[RunRecord], text: str) -> list[Panel]:
    data = [row for record in drawn for row in _rows(record)]
    name = drawn[0].metric_name
    panels = []
    timed = [row["timed"] for row in data]
    for measure, by in product(("metric", "loss"), ("samples", "seconds") if all(timed) else ("samples",)):
        known = [row for row in data if row[measure] is not None]
        if known:
            title = f"{task} · {'test ' + (name if measure == 'metric' else 'loss')} by {by}"
            view = _view(findings, known, drawn[0], measure, by)
            panels.append(
                Panel(title, view, {"rows": known, "target": _target(drawn[0])}, f"{title}. {text}")
            )
    return panels


def _target(record: RunRecord) -> list[Row]:
    return [
        {"target": record.target, "name": f"target {formatting.threshold(record.target, record.metric_name)}"}
    ]


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
        title=f"test {name}" if measure == "metric" else "test loss",
        scale=scale,
        axis=alt.Axis(format=".0%" if percent else "~g", tickCount=5),
    )
    x = common.many("seconds of training" if by == "seconds" else "samples seen", by)
    workers = sorted({int(row["workers"]) for row in data})
    dashes = [[1, 0], [5, 3], [2, 2], [8, 3, 2, 3], [1, 4]]
    dash = alt.StrokeDash(
        "workers:O",
        scale=alt.Scale(domain=workers, range=[dashes[k % len(dashes)] for k in range(len(workers))]),
        legend=alt.Legend(
            title="workers",
            symbolType="stroke",
            orient="bottom",
            direction="horizontal",
            titleOrient="left",
            symbolSize=300,
        )
        if len(workers) > 1
        else None,
    )
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
        level = common.rows("target").encode(y="target:Q")
        layers.insert(0, level.mark_rule(style="guide"))
        layers.append(
            level.mark_text(style="note", align="right", x="width", dx=-4, dy=8).encode(text="name:N")
        )
    return common.layered(*layers)


def _distance(record: RunRecord) -> float:
    """The distance of the best metric from the target, in either direction."""
    return abs(record.best_metric - record.target) if record.best_metric is not None else math.inf


def _sentence(task: str, drawn: list[RunRecord]) -> str:
    arrived = {record.run: found for record in drawn if (found := crossing(record)) is not None}
    name = drawn[0].metric_name
    target = formatting.threshold(drawn[0].target, name)
    if not arrived:
        best = min(drawn, key=_distance)
        return (
            f"{task}: none of the runs drawn here reached {target}; the nearest is {groups.title(best)} "
            f"with {formatting.score(best.best_metric, name)}."
        )
    reached = [(record, arrived[record.run]) for record in drawn if record.run in arrived]
    fewest, least = min(reached, key=lambda pair: pair[1].samples)
    if not all(record.timed for record in drawn):
        return f"{task}: {groups.title(fewest)} is first at {target}, after {_count(least, fewest)}."
    fastest, first = min(reached, key=lambda pair: pair[1].seconds or 0.0)
    text = f"{task}: {groups.title(fastest)} is first at {target} by the clock"
    if fewest is fastest:
        return text + ", and needs the fewest samples too."
    counts = f"{_count(least, fewest)} against {_count(first, fastest)}"
    return f"{text}, {groups.title(fewest)} by samples: {counts}."


def _count(found: Crossing, record: RunRecord) -> str:
    return formatting.count(round(found.samples), record.unit)
