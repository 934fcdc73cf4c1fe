"""Accuracy by batch size, with and without linear scaling and warm-up."""

from __future__ import annotations

from typing import Any

import altair as alt

from manyhands.analysis.generalization import Generalization
from manyhands.core import formatting
from manyhands.report import palette
from manyhands.report.charts import common
from manyhands.report.figure import Figure, Panel, Row, tidy
from manyhands.report.findings import Findings


def figure(findings: Findings) -> Figure | None:
    """One panel per task with several batches, one line per recipe."""
    panels, sentences = [], []
    for task in findings.tasks:
        mine = [each for each in findings.generalization if each.task == task]
        if len({each.batch for each in mine}) < 2:
            continue
        names = {record.metric_name for record in findings.records if record.spec.task == task.split()[0]}
        metric = names.pop() if len(names) == 1 else "metric"
        sentences.append(_sentence(task, mine, metric))
        panels.append(_panel(task, mine, metric, sentences[-1]))
    return Figure(common.sentence(sentences), panels) if panels else None


def _panel(task: str, mine: list[Generalization], metric: str, text: str) -> Panel:
    data: list[Row] = [
        {
            "recipe": each.recipe,
            "batch": each.batch,
            "metric": tidy(each.metric.median),
            "low": tidy(each.metric.low),
            "high": tidy(each.metric.high),
            "shown": formatting.score(each.metric.median, metric),
            "diverged": f"{each.diverged} of {each.of}",
        }
        for each in sorted(mine, key=lambda each: each.batch)
    ]
    looks = palette.looks(common.names(data, "recipe"))
    order, colors, shapes, dashes = palette.domain(list(looks), looks)
    many = len(order) > 1
    key: dict[str, Any] = {} if many else {"legend": None}
    color = alt.Color("recipe:N", scale=alt.Scale(domain=order, range=colors), title=None, **key)
    ends = [end for each in mine if each.metric.n for end in (each.metric.low, each.metric.high)]
    narrow = bool(ends) and max(ends) - min(ends) < 0.01  # with one digit, ticks would have equal labels
    form = alt.Axis(format=".2%" if narrow else ".1%") if metric == "accuracy" else alt.Axis()
    y = alt.Y(
        "metric:Q", title=f"test {metric} at the end", scale=alt.Scale(zero=False, padding=12), axis=form
    )
    base = common.rows().encode(x=common.batch_axis([each.batch for each in mine]), color=color)
    tip = common.tips(
        ("recipe:N", "recipe"),
        ("batch:Q", "batch", ",d"),
        ("shown:N", metric),
        ("diverged:N", "runs that diverged"),
    )
    dash = alt.StrokeDash("recipe:N", scale=alt.Scale(domain=order, range=dashes), title=None, **key)
    form_of = alt.Shape("recipe:N", scale=alt.Scale(domain=order, range=shapes), title=None, **key)
    layers = common.layered(
        base.mark_line().encode(y=y, strokeDash=dash),
        base.mark_rule(strokeWidth=1.4).encode(y=alt.Y("low:Q"), y2="high:Q"),
        base.mark_point().encode(y="metric:Q", shape=form_of, tooltip=tip),
    )
    return Panel(task, layers, {"rows": data}, f"Test {metric} by batch and recipe. {text}")


def _sentence(task: str, mine: list[Generalization], metric: str) -> str:
    """The metric of each recipe at its smallest and largest batch."""
    parts = []
    for recipe in dict.fromkeys(each.recipe for each in mine):
        line = sorted((each for each in mine if each.recipe == recipe), key=lambda each: each.batch)
        first, last = line[0], line[-1]
        if len(line) < 2:
            ended = formatting.score(last.metric.median, metric) if last.metric.n else "diverging"
            parts.append(f"{recipe} ends at {ended} at batch {last.batch:,}")
            continue
        parts.append(
            f"{recipe} goes from {formatting.score(first.metric.median, metric)} at batch {first.batch:,} "
            f"to {formatting.score(last.metric.median, metric)} at {last.batch:,}"
            + (f" ({last.diverged} of {last.of} diverged)" if last.diverged else "")
        )
    return f"{task}: {'; '.join(parts[:3])}." if parts else ""
