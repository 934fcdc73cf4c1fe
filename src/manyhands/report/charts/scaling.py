"""Speed-up and efficiency of each strategy by number of workers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import altair as alt

from manyhands.analysis.scaling import Curve
from manyhands.core import formatting
from manyhands.report.charts import common
from manyhands.report.figure import Figure, Panel, Row, tidy
from manyhands.report.findings import Findings


def figure(findings: Findings) -> Figure | None:
    """Two panels per task and kind of scaling: speed-up and efficiency at one batch."""
    panels: list[Panel] = []
    sentences: list[str] = []
    drawn = 0
    for task in findings.tasks:
        for number, chosen in enumerate(_chosen(findings, task)):
            data = _rows(chosen)
            if not data:
                continue
            drawn += len(chosen)
            panels += _panels(findings, chosen, data)
            sentences += [_sentence(chosen, data)] if number == 0 else []  # one per task is enough
    if not panels:
        return None
    left = sum(curve.task in findings.tasks for curve in findings.curves) - drawn
    note = (
        f"{formatting.plural(left, 'further curve')} at other batches can be read from the table."
        if left
        else ""
    )
    return Figure(common.sentence(sentences), panels, note)


def _chosen(findings: Findings, task: str) -> list[list[Curve]]:
    """The curves of strong and of weak scaling, each at the batch with the most points."""
    found, usual = [], findings.shown_batch(task)
    for kind in ("strong", "weak"):
        mine = [curve for curve in findings.curves if curve.task == task and curve.kind == kind]
        size = Counter[int]()
        for curve in mine:
            size[curve.fixed] += len(curve.points)
        if size:
            fixed = max(size, key=lambda each: (size[each], each == usual, each))
            found.append([curve for curve in mine if curve.fixed == fixed])
    return found


def _rows(curves: list[Curve]) -> list[Row]:
    return [
        {
            "variant": curve.variant,
            "workers": point.workers,
            "batch": point.batch,
            "speed_up": tidy(point.speed_up.median),
            "low": tidy(point.speed_up.low),
            "high": tidy(point.speed_up.high),
            "efficiency": tidy(point.efficiency),
            "throughput": tidy(point.throughput.median),
            "noisy": "yes" if point.noisy else "no",
            "run": common.runs(point.runs),
        }
        for curve in curves
        for point in curve.points
        if point.speed_up is not None
    ]


def _title(curve: Curve) -> str:
    what = f"batch {curve.fixed:,}" if curve.kind == "strong" else f"batch {curve.fixed:,} per worker"
    return f"{curve.task} · {what}"


def _panels(findings: Findings, curves: list[Curve], data: list[Row]) -> list[Panel]:
    first = curves[0]
    baseline = first.baseline.name if first.baseline else "one worker"
    most = max(int(row["workers"]) for row in data)
    tip = common.tips(
        ("variant:N", "strategy"),
        ("workers:Q", "workers"),
        ("batch:Q", "batch", ",d"),
        ("speed_up:Q", "speed-up", ".2f"),
        ("low:Q", "from", ".2f"),
        ("high:Q", "to", ".2f"),
        ("efficiency:Q", "efficiency", ".0%"),
        ("throughput:Q", "samples/s", ",.0f"),
        ("noisy:N", "noisy machine"),
        common.RUN,
    )
    x = common.counts_axis("workers", "workers", [int(row["workers"]) for row in data])
    color, shape = common.color(findings.looks, data), common.shape(findings.looks, data)
    base = common.rows().encode(x=x, color=color)
    ideal: list[Row] = [{"workers": n, "ideal": n, "one": 1} for n in (1, most)]
    extra: dict[str, list[Row]] = {"rows": data, "ideal": ideal, "threads": _threads(curves)}
    guide = common.rows("ideal").mark_line(style="guide").encode(x="workers:Q")
    y = alt.Y("speed_up:Q", title=f"speed-up over {baseline}", scale=alt.Scale(domainMin=0))
    layers: list[alt.Chart] = [
        guide.encode(y=alt.Y("ideal:Q")),
        common.rows("ideal")
        .mark_text(style="note", align="right", dx=-8, dy=-2, text="ideal")
        .transform_filter(alt.datum.workers == most)
        .encode(x="workers:Q", y="ideal:Q"),
        base.mark_line(strokeOpacity=0.85).encode(y=y),
        base.mark_rule(strokeWidth=1.5).encode(y="low:Q", y2="high:Q"),
        base.mark_point().encode(y="speed_up:Q", shape=shape, tooltip=tip),
    ]
    if extra["threads"]:
        level = common.rows("threads").encode(y="speed_up:Q")
        layers.insert(0, level.mark_rule(style="guide"))
        layers.append(_label(level, data, float(extra["threads"][0]["speed_up"])))
    shown = _sentence(curves, data)
    second = [
        guide.encode(y=alt.Y("one:Q")),
        base.mark_line(strokeOpacity=0.85).encode(
            y=alt.Y(
                "efficiency:Q",
                title="efficiency (speed-up per worker)",
                axis=alt.Axis(format="%"),
                scale=alt.Scale(domainMin=0),
            )
        ),
        base.mark_point().encode(y="efficiency:Q", shape=shape, tooltip=tip),
    ]
    return [
        Panel(_title(first), common.layered(*layers), extra, f"Speed-up by workers. {shown}"),
        Panel(
            f"{_title(first)} · efficiency",
            common.layered(*second),
            {"rows": data, "ideal": ideal},
            f"Efficiency, speed-up divided by workers. {shown}",
        ),
    ]


def _label(level: alt.Chart, data: list[Row], height: float) -> alt.Chart:
    """The label of the line for plain threads, on the side with fewer points near it."""
    top = max(float(row["workers"]) for row in data)
    gaps = [float(row["speed_up"]) - height for row in data if float(row["workers"]) == top]
    above, below = (sum(0 < side * gap < 0.08 * top for gap in gaps) for side in (1, -1))
    name: alt.Chart = level.mark_text(style="note", align="right", x="width", dy=-7 if above <= below else 9)
    return name.encode(text="name:N")


def _threads(curves: list[Curve]) -> list[Row]:
    """The speed-up of one worker with all cores as threads: what a user would have without manyhands."""
    for curve in curves:
        if curve.baseline and curve.threads_baseline and curve.threads_baseline.threads > 1:
            ratio = curve.threads_baseline.throughput.median / curve.baseline.throughput.median
            name = f"one worker, {curve.threads_baseline.threads} threads: {ratio:.2f}x"
            return [{"speed_up": tidy(ratio), "name": name}]
    return []


def _sentence(curves: list[Curve], data: list[Row]) -> str:
    best: Any = max(data, key=lambda row: row["speed_up"])
    first = curves[0]
    baseline = first.baseline.name if first.baseline else "one worker"
    text = (
        f"{_title(first)}: {best['variant']} with {formatting.plural(best['workers'], 'worker')} is "
        f"{best['speed_up']:.2f}x as fast as {baseline}"
    )
    if best["efficiency"] is not None and best["workers"] > 1:
        text += f" ({formatting.percent(best['efficiency'])} efficiency)"
    more: Any = [
        row for row in data if row["variant"] == best["variant"] and row["workers"] > best["workers"]
    ]
    if more:
        last = max(more, key=lambda row: row["workers"])
        text += f"; {last['workers']} workers bring only {last['speed_up']:.2f}x"
    return text + "."
