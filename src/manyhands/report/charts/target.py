"""Time to the target: a heat map by workers and batch, and the best result of each strategy."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import altair as alt

from manyhands.analysis.scaling import Point
from manyhands.analysis.target import ToTarget
from manyhands.core import formatting
from manyhands.core.registry.strategies import ONE_WORKER
from manyhands.report import palette
from manyhands.report.charts import common
from manyhands.report.figure import Figure, Panel, Row, limited, tidy
from manyhands.report.findings import Findings

MOST_ROWS, MOST_BATCHES = 28, 12


def heat_map(findings: Findings) -> Figure | None:
    """One row per strategy and worker count, one column per batch; missed targets are marked."""
    panels, sentences, left = [], [], 0
    for task in findings.tasks:
        mine = _of_task(findings, task)
        timed = [each for each in mine if each.best_seconds is not None]
        if not timed:
            continue
        batches = _kept_batches(mine)
        seen = [each for each in mine if each.batch in batches]
        kept = _fastest_rows(seen)
        left += len({_place(each) for each in seen} - kept)
        data = [_cell(findings, each, timed) for each in seen if _place(each) in kept]
        sentences.append(_sentence(timed, len({each.batch for each in mine})))
        panels.append(_map(task, data, timed[0], sentences[-1]))
    if not panels:
        return None
    return Figure(common.sentence(sentences), panels, limited(left, "row"))


def _of_task(findings: Findings, task: str) -> list[ToTarget]:
    """The cells with the most common target: seconds to different targets cannot be compared."""
    mine = [each for each in findings.to_target if each.task == task]
    usual = Counter(each.target for each in mine).most_common(1)
    return [each for each in mine if each.target == usual[0][0]]


def _seconds(each: ToTarget) -> float:
    """Seconds to the target; infinity if it was not reached."""
    return each.best_seconds if each.best_seconds is not None else math.inf


def _place(each: ToTarget) -> tuple[str, int, int]:
    return each.variant, each.workers, each.threads


def _row_name(each: ToTarget | Point) -> str:
    if each.variant == ONE_WORKER:
        return f"{each.variant} · {formatting.plural(each.threads, 'thread')}"
    return f"{each.variant} · {each.workers}"


def _spoken(each: ToTarget | Point) -> str:
    return common.spoken(each.variant, each.workers, each.threads)


def _kept_batches(mine: list[ToTarget]) -> set[int]:
    batches = sorted({each.batch for each in mine})
    if len(batches) <= MOST_BATCHES:
        return set(batches)
    stride = (len(batches) - 1) / (MOST_BATCHES - 1)
    return {batches[round(k * stride)] for k in range(MOST_BATCHES)}


def _fastest_rows(timed: list[ToTarget]) -> set[tuple[str, int, int]]:
    best: dict[tuple[str, int, int], float] = {}
    for each in timed:
        best[_place(each)] = min(best.get(_place(each), math.inf), _seconds(each))
    return set(sorted(best, key=lambda place: best[place])[:MOST_ROWS])


def _cell(findings: Findings, each: ToTarget, timed: list[ToTarget]) -> Row:
    known = [_seconds(other) for other in timed]
    low, high = math.log(min(known)), math.log(max(known))
    order = findings.variants.index(each.variant) * 1000 + each.workers + each.threads / 100
    row: dict[str, Any] = {
        "variant": each.variant,
        "place": _row_name(each),
        "order": order,
        "workers": each.workers,
        "batch": each.batch,
        "reached": f"{each.reached} of {each.of}",
        "run": common.runs(each.runs),
    }
    seconds = each.best_seconds
    if seconds is None:
        what, label = ("not timed", "·") if each.reached else ("not reached", "–")
        return row | {"seconds": None, "label": label, "shown": what, "bright": False}
    share = (math.log(seconds) - low) / ((high - low) or 1.0)
    more = " (seconds per step x steps)"
    if each.seconds is not None:
        interval = f" ({formatting.duration(each.seconds.low)} to {formatting.duration(each.seconds.high)})"
        more = interval if each.seconds.n > 1 else ""
    return row | {
        "seconds": tidy(seconds),
        "label": _brief(seconds),
        "shown": formatting.duration(seconds) + more,
        "steps": tidy(each.steps.median) if each.steps else None,
        "bright": share < 0.45,
    }


def _brief(seconds: float) -> str:
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.1f}" if seconds < 9.95 else f"{seconds:.0f}"


def _map(task: str, data: list[Row], one: ToTarget, text: str) -> Panel:
    tip = common.tips(
        ("place:N", "strategy · workers"),
        ("batch:O", "batch"),
        ("shown:N", "time to target"),
        ("steps:Q", "steps", ",.0f"),
        ("reached:N", "runs that reached it"),
        common.RUN,
    )
    base = common.rows().encode(
        x=alt.X("batch:O", title="batch", axis=alt.Axis(labelAngle=0, domain=False, ticks=False)),
        y=alt.Y(
            "place:N",
            title=None,
            sort=alt.EncodingSortField("order", op="min"),
            axis=alt.Axis(labelLimit=150),
        ),
        tooltip=tip,
    )
    scale = alt.Scale(type="log", range=list(palette.HEAT), interpolate="lab")
    cells = base.mark_rect(style="gap", cornerRadius=3).encode(
        color=alt.Color("seconds:Q", scale=scale, legend=None)
    )
    dark, light = "#12212f", "#ffffff"
    numbers = (
        base.transform_filter("datum.seconds != null")
        .mark_text(fontSize=11)
        .encode(text="label:N", color=alt.condition("datum.bright", alt.value(light), alt.value(dark)))
    )
    nothing = base.transform_filter("datum.seconds == null").mark_text(style="note").encode(text="label:N")
    target = formatting.threshold(one.target, one.metric_name)
    return Panel(
        f"{task} · seconds to {target} {one.metric_name}",
        common.layered(cells.transform_filter("datum.seconds != null"), numbers, nothing),
        {"rows": data},
        f"Map of seconds to the target by strategy, workers and batch. {text} "
        "A dash: not reached; a dot: not timed.",
        step=27,
    )


def _sentence(timed: list[ToTarget], batches: int) -> str:
    best, slow = min(timed, key=_seconds), max(timed, key=_seconds)
    among = f" of {batches} batches" if batches > 1 else ""
    text = (
        f"{best.task}: {_spoken(best)} at batch {best.batch:,}{among} reaches the target first, "
        f"after {formatting.duration(_seconds(best))}"
    )
    if slow is not best:
        text += f"; {_spoken(slow)} at batch {slow.batch:,} takes {formatting.duration(_seconds(slow))}"
    return text + "."


def best_of_each(findings: Findings) -> Figure | None:
    """The first chart: each strategy at its best, the fastest first."""
    panels, sentences = [], []
    for task in findings.tasks:
        timed = [each for each in _of_task(findings, task) if each.seconds is not None]
        data = _best_times(timed) if timed else _best_rates(findings.points[task])
        if len(data) < 1:
            continue
        first: Any = data[0]
        axis = "seconds to the target" if timed else "samples per second"
        text = f"{task}: {first['spoken']} comes first with {first['shown']}" + (
            f", {data[-1]['spoken']} last with {data[-1]['shown']}." if len(data) > 1 else "."
        )
        sentences.append(text)
        panels.append(_bars(findings, task, data, axis, text))
    return Figure(common.sentence(sentences), panels) if panels else None


def _best_times(timed: list[ToTarget]) -> list[Row]:
    best: dict[str, ToTarget] = {}
    for each in sorted(timed, key=_seconds):
        best.setdefault(_kind(each), each)
    return [
        {
            "variant": each.variant,
            "title": _long_name(each),
            "spoken": f"{_spoken(each)} at batch {each.batch:,}",
            "value": tidy(each.seconds.median),
            "low": tidy(each.seconds.low),
            "high": tidy(each.seconds.high),
            "shown": formatting.duration(each.seconds.median),
            "run": common.runs(each.runs),
        }
        for each in best.values()
        if each.seconds
    ]


def _best_rates(points: list[Point]) -> list[Row]:
    best: dict[str, Point] = {}
    for each in sorted(points, key=lambda each: -each.throughput.median):
        best.setdefault(_kind(each), each)
    return [
        {
            "variant": each.variant,
            "title": _long_name(each),
            "spoken": f"{_spoken(each)} at batch {each.batch:,}",
            "value": tidy(each.throughput.median),
            "low": tidy(each.throughput.low),
            "high": tidy(each.throughput.high),
            "shown": f"{each.throughput.median:,.0f}/s",
            "run": common.runs(each.runs),
        }
        for each in best.values()
    ]


def _kind(each: ToTarget | Point) -> str:
    """The strategy; plain threads count as their own, because they are the baseline without manyhands."""
    return f"{each.variant} {each.threads > 1}" if each.variant == ONE_WORKER else each.variant


def _long_name(each: ToTarget | Point) -> str:
    return f"{_row_name(each)} · batch {each.batch:,}"


def _bars(findings: Findings, task: str, data: list[Row], axis: str, text: str) -> Panel:
    tip = common.tips(("title:N", "best of its kind"), ("shown:N", axis), common.RUN)
    longest = max(max(float(row["value"]), float(row["high"])) for row in data)
    room = alt.Scale(domain=[0, 1.4 * longest], nice=False)  # space for the number at the end of the bar
    base = common.rows().encode(
        y=alt.Y("title:N", sort=None, title=None, axis=alt.Axis(labelLimit=230)),
        x=alt.X("value:Q", title=axis, scale=room, axis=alt.Axis(grid=True, tickCount=5)),
        tooltip=tip,
    )
    bars = base.mark_bar(height={"band": 0.62}).encode(color=common.color(findings.looks, data, legend=False))
    ends = base.mark_rule(style="ink", strokeWidth=1.2).encode(x="low:Q", x2="high:Q")
    return Panel(
        task,
        common.layered(
            bars, ends, base.mark_text(style="label", align="left", dx=6).encode(x="high:Q", text="shown:N")
        ),
        {"rows": data},
        f"Each strategy at its best. {text}",
        step=30,
    )
