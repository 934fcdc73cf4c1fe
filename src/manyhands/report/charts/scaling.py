"""Speed-up and efficiency of each strategy by number of workers."""

from __future__ import annotations

from collections import Counter

import altair as alt

from manyhands.analysis import groups
from manyhands.analysis.scaling import Curve, Point
from manyhands.core import formatting
from manyhands.report import palette
from manyhands.report.charts import common, sureness
from manyhands.report.figure import Figure, Panel, Row, tidy
from manyhands.report.findings import Findings


def figure(findings: Findings) -> Figure | None:
    """Two panels per task and kind of scaling: speed-up and efficiency at one batch."""
    panels: list[Panel] = []
    sentences: list[str] = []
    drawn = 0
    for task in findings.tasks:
        for number, chosen in enumerate(_chosen(findings, task)):
            data = _rows(findings, chosen)
            if not data:
                continue
            drawn += len(chosen)
            text = _sentence(findings, chosen)
            panels += _panels(findings, chosen, data, text)
            sentences += [text] if number == 0 else []  # one per task is enough
    if not panels:
        return None
    left = sum(curve.task in findings.tasks for curve in findings.curves) - drawn
    note = (
        f"{formatting.plural(left, 'more curve')} at other batches: see the table of all runs."
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


def _members(curves: list[Curve]) -> list[tuple[str, Point]]:
    """The points with a speed-up, each with the variant of its curve: curves may share their first point."""
    return [(c.variant, point) for c in curves for point in c.points if point.speed_up is not None]


def _leaders(findings: Findings, curves: list[Curve]) -> list[Point]:
    """The fastest points of these curves that are not told apart; one worker with all cores takes part."""
    once = {sureness.cell_key(point): point for _, point in _members(curves)}
    first = curves[0]
    plain = [
        point
        for point in findings.points.get(first.task, [])
        if first.kind == "strong"
        and point.batch == first.fixed
        and point.threads > 1
        and groups.one_plain_worker(point.variant, point.workers)
    ]
    return findings.fastest([*once.values(), *plain])


def _rows(findings: Findings, curves: list[Curve]) -> list[Row]:
    if not (members := _members(curves)):
        return []
    won = {sureness.cell_key(each) for each in _leaders(findings, curves)}
    return [
        {
            "variant": variant,
            "workers": point.workers,
            "batch": point.batch,
            "speed_up": tidy(point.speed_up.median),
            "low": tidy(point.speed_up.low),
            "high": tidy(point.speed_up.high),
            "interval": sureness.interval(point.speed_up, point.how, lambda end: f"{end:.2f}x"),
            "efficiency": tidy(point.efficiency),
            "throughput": tidy(point.throughput.median),
            "noisy": "yes" if point.noisy else "no",
            "winner": "yes" if sureness.cell_key(point) in won else "",
            "run": common.runs(point.runs),
        }
        for variant, point in members
        if point.speed_up is not None
    ]


def _title(curve: Curve) -> str:
    what = f"batch {curve.fixed:,}" if curve.kind == "strong" else f"batch {curve.fixed:,} per worker"
    return f"{curve.task} · {what}"


def _panels(findings: Findings, curves: list[Curve], data: list[Row], shown: str) -> list[Panel]:
    first = curves[0]
    baseline = first.baseline.spoken if first.baseline else "one worker"
    most = max(int(row["workers"]) for row in data)
    tip = common.tips(
        ("variant:N", "strategy"),
        ("workers:Q", "workers"),
        ("batch:Q", "batch", ",d"),
        ("speed_up:Q", "speed-up", ".2f"),
        ("interval:N", "95 % interval"),
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
    y = alt.Y("speed_up:Q", title="speed-up", scale=alt.Scale(domainMin=0))
    ring = common.rows().encode(x=x).transform_filter("datum.winner == 'yes'")
    layers: list[alt.Chart] = [
        guide.encode(y=alt.Y("ideal:Q")),
        base.mark_line(strokeOpacity=0.85).encode(y=y),
        base.mark_rule(strokeWidth=1.5).encode(y="low:Q", y2="high:Q"),
        ring.mark_point(shape="circle", filled=False, size=200, color=palette.INK, strokeWidth=1.3).encode(
            y="speed_up:Q"
        ),
        base.mark_point().encode(y="speed_up:Q", shape=shape, tooltip=tip),
    ]
    if extra["threads"]:
        layers.insert(0, common.rows("threads").encode(y="speed_up:Q").mark_rule(style="second-guide"))
    ring_name = "Ringed: the fastest"
    if len(_leaders(findings, curves)) > 1:
        ring_name += ", and what is not told apart from it"
    notes = [
        f"Over {baseline}.",
        "Dashed: ideal.",
        *(f"Dotted: {row['name']}." for row in extra["threads"]),
        f"{ring_name}.",
        sureness.intervals_note((point.how for _, point in _members(curves) if point.workers > 1), "Bars"),
    ]
    second = [
        guide.encode(y=alt.Y("one:Q")),
        base.mark_line(strokeOpacity=0.85).encode(
            y=alt.Y(
                "efficiency:Q",
                title="efficiency",
                axis=alt.Axis(format="%"),
                scale=alt.Scale(domainMin=0),
            )
        ),
        base.mark_point().encode(y="efficiency:Q", shape=shape, tooltip=tip),
    ]
    return [
        Panel(
            f"{_title(first)} · speed-up",
            common.layered(*layers),
            extra,
            f"Speed-up by workers. {shown}",
            note=" ".join(filter(None, notes)),
        ),
        Panel(
            f"{_title(first)} · efficiency",
            common.layered(*second),
            {"rows": data, "ideal": ideal},
            f"Efficiency, speed-up divided by workers. {shown}",
            note="Speed-up per worker. Dashed: ideal.",
        ),
    ]


def _threads(curves: list[Curve]) -> list[Row]:
    """The speed-up of one worker with all cores as threads: what a user would have without manyhands."""
    for curve in curves:
        if curve.baseline and curve.threads_baseline and curve.threads_baseline.threads > 1:
            ratio = curve.threads_baseline.throughput.median / curve.baseline.throughput.median
            name = f"one worker with {curve.threads_baseline.threads} threads, {ratio:.2f}x"
            return [{"speed_up": tidy(ratio), "name": name}]
    return []


def _sentence(findings: Findings, curves: list[Curve]) -> str:
    """Who computes fastest at this batch, and what more workers of the same kind do."""
    leaders, first = _leaders(findings, curves), curves[0]
    members = [point for _, point in _members(curves)]
    named = [common.spoken(each.variant, each.workers, each.threads) for each in leaders]
    text = f"{_title(first)}: by samples per second, {sureness.fastest(named)}"
    if (ahead := leaders[0].speed_up) is not None and leaders[0].workers * leaders[0].threads > 1:
        over = first.baseline.spoken if first.baseline else "one worker"
        which = "it is" if len(leaders) == 1 else "the first is"
        text += f"; {which} {ahead.median:.2f}x ({ahead.low:.2f} to {ahead.high:.2f}) as fast as {over}"
    most, ahead_with = (max(each.workers for each in found) for found in (members, leaders))
    if most > max(2, ahead_with):
        text += f". With {most} workers all are slower than that"
    return text + "."
