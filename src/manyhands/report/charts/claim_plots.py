"""The picture of a claim: what was found here, beside what was published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from manyhands.claims import Dot, Finding, Line, Plot
from manyhands.report import palette
from manyhands.report.charts import common
from manyhands.report.figure import Figure, Panel, Row, tidy


def figure(finding: Finding) -> Figure | None:
    """One panel per plot; None if the finding has none."""
    panels = [_panel(plot) for plot in finding.plots if any(line.dots for line in plot.lines)]
    return Figure("", panels) if panels else None


def _panel(plot: Plot) -> Panel:
    looks = palette.looks(line.name for line in plot.lines)
    order, colors, shapes, _ = palette.domain(list(looks), looks)
    key: dict[str, Any] = {"legend": alt.Legend(columns=2)} if len(order) > 1 else {"legend": None}
    color = alt.Color("line:N", scale=alt.Scale(domain=order, range=colors), title=None, **key)
    shape = alt.Shape("line:N", scale=alt.Scale(domain=order, range=shapes), title=None, **key)
    x, y = _x(plot), _y(plot)
    marked = common.rows("marked").encode(x=x, color=color)
    layers = [
        common.rows("joined").mark_line(clip=True).encode(x=x, y=y, color=color),
        marked.mark_rule(strokeWidth=1.4).encode(y=alt.Y("low:Q", **_shared(plot)), y2="high:Q"),
        marked.mark_point(clip=True).encode(y=y, shape=shape),
    ]
    datasets: dict[str, list[Row]] = {
        "rows": [_row(line, dot) for line in plot.lines for dot in line.dots],
        "joined": [_row(line, dot) for line in plot.lines if line.joined for dot in line.dots],
        "marked": [_row(line, dot) for line in plot.lines if line.marked for dot in line.dots],
    }
    if plot.level is not None:
        guide = common.rows("level").mark_rule(style="guide").encode(y=alt.Y("level:Q", **_shared(plot)))
        layers.insert(0, guide)
        datasets["level"] = [{"level": plot.level}]
    return Panel(plot.title, common.layered(*layers), datasets, f"{plot.title}: {plot.y} by {plot.x}.")


def _row(line: Line, dot: Dot) -> Row:
    ends = {
        "low": dot.low if dot.low is not None else dot.y,
        "high": dot.high if dot.high is not None else dot.y,
    }
    known = {name: tidy(value) for name, value in {"y": dot.y, **ends}.items()}
    x = dot.x if isinstance(dot.x, str) else tidy(dot.x)
    return {"line": line.name, "x": x, **known}


def _x(plot: Plot) -> alt.X:
    xs = [dot.x for line in plot.lines for dot in line.dots]
    if any(isinstance(x, str) for x in xs):
        names = list(dict.fromkeys(map(str, xs)))
        angle = -25 if max(map(len, names)) > 60 / len(names) else 0  # long names would cover each other
        axis = alt.Axis(labelAngle=angle, labelOverlap=False, labelLimit=220)
        return alt.X("x:N", title=plot.x or None, sort=names, axis=axis)
    if not plot.log_x:
        return alt.X("x:Q", title=plot.x, scale=alt.Scale(zero=False, nice=False, padding=14))
    numbers = sorted({float(x) for x in xs})
    scale = alt.Scale(type="log", base=2, nice=False, padding=14)
    ticks = numbers if len(numbers) <= 10 else alt.Undefined
    return alt.X("x:Q", title=plot.x, scale=scale, axis=alt.Axis(values=ticks, format=",.0f"))


def _y(plot: Plot) -> alt.Y:
    form = ".0%" if plot.percent else "~s" if _largest(plot.lines) >= 1000 else "~g"
    return alt.Y("y:Q", title=plot.y, axis=alt.Axis(format=form), **_shared(plot))


def _shared(plot: Plot) -> dict[str, Any]:
    """The scale that all layers share: as wide as the values, not as an interval that reaches far beyond."""
    ys = [dot.y for line in plot.lines for dot in line.dots]
    ends = [
        end
        for line in plot.lines
        for dot in line.dots
        for end in (dot.low, dot.high)
        if end is not None and min(ys) / 3 <= end <= 3 * max(ys)
    ]
    low, high = min([*ys, *ends]), max([*ys, *ends])
    if plot.log_y:
        return {"scale": alt.Scale(type="log", domain=[low / 1.1, high * 1.1], nice=False, clamp=True)}
    room = (high - low or abs(high) or 1.0) * 0.1
    least = 0.0 if plot.zero else max(0.0, low - room)
    return {"scale": alt.Scale(domain=[least, high + room], nice=True, clamp=True)}


def _largest(lines: Sequence[Line]) -> float:
    return max(dot.y for line in lines for dot in line.dots)
