"""The first chart of the page: each strategy where it is at its best, the fastest first."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from manyhands.analysis.scaling import Point
from manyhands.analysis.target import ToTarget
from manyhands.core.registry.strategies import ONE_WORKER
from manyhands.core.statistics import Summary
from manyhands.report.charts import common, sureness
from manyhands.report.figure import Figure, Panel, Row, tidy
from manyhands.report.findings import Findings


def figure(findings: Findings) -> Figure | None:
    """One bar per strategy, of the cells that the answer compares: by time to the target, or by speed."""
    panels, sentences = [], []
    for task in findings.tasks:
        cells = _best_of_each([*findings.candidates(task), *findings.untried(task)])
        if len(cells) < 2:
            continue
        sentences.append(_sentence(findings, task, cells))
        panels.append(_bars(findings, task, cells, sentences[-1]))
    return Figure(common.sentence(sentences), panels) if panels else None


def _best_of_each(candidates: Sequence[ToTarget | Point]) -> list[ToTarget | Point]:
    """One cell per kind, the fastest first."""
    best: dict[str, ToTarget | Point] = {}
    for each in sorted(candidates, key=_slowness):
        best.setdefault(_kind(each), each)
    return list(best.values())


def _slowness(each: ToTarget | Point) -> float:
    value = _value(each).median
    return -value if isinstance(each, Point) else value


def _kind(each: ToTarget | Point) -> str:
    """The strategy; plain threads count as their own, because they are the baseline without manyhands."""
    return f"{each.variant} {each.threads > 1}" if each.variant == ONE_WORKER else each.variant


def _value(each: ToTarget | Point) -> Summary:
    found = each.throughput if isinstance(each, Point) else each.seconds
    assert found is not None, "cells without a time are not drawn"
    return found


def _how(each: ToTarget | Point) -> str:
    return each.how if isinstance(each, Point) else each.basis


def _shown(each: ToTarget | Point, value: float) -> str:
    return f"{value:,.0f}/s" if isinstance(each, Point) else common.brief_time(value)


def _row(each: ToTarget | Point, mark: str) -> Row:
    value = _value(each)
    shown = _shown(each, value.median)
    return {
        "variant": each.variant,
        "title": f"{common.place(each.variant, each.workers, each.threads)} · batch {each.batch:,}",
        "value": tidy(value.median),
        "low": tidy(value.low),
        "high": tidy(value.high),
        "shown": shown,
        "label": f"{shown} {mark}".strip(),
        "interval": sureness.interval(value, _how(each), lambda end: _shown(each, end)),
        "run": common.runs(each.runs),
    }


def _bars(findings: Findings, task: str, cells: Sequence[ToTarget | Point], text: str) -> Panel:
    won = {sureness.cell_key(each) for each in findings.winners(task)}
    untried = {sureness.cell_key(each) for each in findings.untried(task)}
    marks = dict.fromkeys(won, sureness.TIED) | dict.fromkeys(untried, sureness.UNTRIED)
    data = [_row(each, marks.get(sureness.cell_key(each), "")) for each in cells]
    timed = not isinstance(cells[0], Point)
    axis = "time to the target" if timed else f"{_unit(findings, task)} per second"
    tip = common.tips(
        ("title:N", "at its best"), ("shown:N", axis), ("interval:N", "95 % interval"), common.RUN
    )
    longest = max(max(float(row["value"]), float(row["high"])) for row in data)
    room = alt.Scale(domain=[0, 1.4 * longest], nice=False)  # space for the number at the end of the bar
    ticks = common.time_axis(grid=True, tickCount=5) if timed else alt.Axis(grid=True, tickCount=5)
    base = common.rows().encode(
        y=alt.Y("title:N", sort=None, title=None),
        x=alt.X("value:Q", title=axis, scale=room, axis=ticks),
        tooltip=tip,
    )
    bars = base.mark_bar(height={"band": 0.62}).encode(color=common.color(findings.looks, data, legend=False))
    ends = base.mark_rule(style="ink", strokeWidth=1.2).encode(x="low:Q", x2="high:Q")
    label = base.mark_text(style="label", align="left", dx=6).encode(x="high:Q", text="label:N")
    mark = sureness.TIED_NOTE if len(won) > 1 else sureness.ONE_NOTE
    mark += f"; {sureness.UNTRIED_NOTE}" if untried else ""
    return Panel(
        f"{task} · {axis}",
        common.layered(bars, ends, label),
        {"rows": data},
        f"Each strategy at its best. {text}",
        step=30,
        note=f"{mark}. {sureness.intervals_note(map(_how, cells))}",
    )


def _unit(findings: Findings, task: str) -> str:
    found = next((r for each in findings.points[task] for r in each.runs), "")
    record = findings.by_run.get(found)
    return record.unit if record else "samples"


def _sentence(findings: Findings, task: str, cells: Sequence[ToTarget | Point]) -> str:
    named = [
        f"{common.spoken(each.variant, each.workers, each.threads)} at batch {each.batch:,}"
        f" ({_shown(each, _value(each).median)})"
        for each in findings.winners(task)
    ]
    last = [each for each in cells if each not in findings.untried(task)][-1]
    text = f"{task}: {sureness.fastest(named)}" if named else f"{task}"
    place = common.spoken(last.variant, last.workers, last.threads)
    return f"{text}; {place} comes last with {_shown(last, _value(last).median)}."
