"""Machine noise: how long a fixed computation took during the study."""

from __future__ import annotations

import datetime

import altair as alt

from manyhands.core import formatting
from manyhands.core.statistics import NOISY, at_its_best
from manyhands.report.charts import common
from manyhands.report.figure import Figure, Panel, Row, tidy
from manyhands.report.findings import Findings

MOST = 400  # points, about


def figure(findings: Findings) -> Figure | None:
    """Each calibration relative to the best one, and the line above which runs count as noisy."""
    found = findings.results.calibrations
    if len(found) < 2:
        return None
    best = at_its_best([each.seconds for each in found])
    start = datetime.datetime.fromisoformat(found[0].at)
    stride = max(1, len(found) // MOST)
    data: list[Row] = []
    for each in found[::stride]:
        at = datetime.datetime.fromisoformat(each.at)
        slower = each.seconds / best - 1
        data.append(
            {
                "minutes": tidy((at - start).total_seconds() / 60),
                "slower": tidy(slower),
                "state": "noisy" if slower > NOISY else "quiet",
                "took": formatting.duration(each.seconds),
            }
        )
    noisy = sum(each.seconds / best - 1 > NOISY for each in found)
    worst = max(each.seconds for each in found) / best - 1
    lowest = min(each.seconds for each in found) / best - 1
    many = f"{noisy} of {len(found)}" if noisy else f"none of {len(found)}"
    text = (
        f"The machine was at most {formatting.percent(worst)} slower than in a good moment; {many} "
        f"calibrations found it noisy (over {formatting.percent(NOISY)} slower)."
    )
    base = common.rows().encode(
        x=alt.X(
            "minutes:Q",
            title="minutes since the study began",
            scale=alt.Scale(nice=False, padding=12),
            axis=alt.Axis(tickCount=8),
        ),
        y=alt.Y(
            "slower:Q",
            title="slower than in a good moment",
            axis=alt.Axis(format="%", tickCount=5),
            scale=alt.Scale(domain=[_floor(lowest), 1.1 * max(worst, NOISY / 3)], nice=False),
        ),
    )
    color = common.fixed("state", {"quiet": "#0072b2", "noisy": "#d55e00"}, legend=False)
    shape = alt.Shape(
        "state:N", scale=alt.Scale(domain=["quiet", "noisy"], range=["circle", "triangle-up"]), legend=None
    )
    tip = common.tips(
        ("minutes:Q", "minute", ".1f"),
        ("slower:Q", "slower by", ".1%"),
        ("took:N", "took"),
        ("state:N", "machine"),
    )
    zero = common.rows("zero").encode(y="slower:Q").mark_rule(style="ink", strokeWidth=0.6, strokeOpacity=0.5)
    view = common.layered(
        common.rows("limit").encode(y="slower:Q").mark_rule(style="guide"),
        zero,
        base.mark_line(strokeWidth=1, strokeOpacity=0.5, color="#0072b2"),
        base.mark_point(size=40).encode(color=color, shape=shape, tooltip=tip),
    )
    limit: list[Row] = [{"slower": NOISY}] if worst > NOISY / 3 else []
    lines: dict[str, list[Row]] = {"rows": data, "limit": limit, "zero": [{"slower": 0}]}
    note = (
        f"Dashed: noisy from {formatting.percent(NOISY)} on. Points below 0 % were even faster."
        if limit
        else ""
    )
    return Figure(text, [Panel("", view, lines, text, 200, wide=True, note=note)])


def _floor(lowest: float) -> float:
    """The lower end of the axis: below all points, which would otherwise lie on the labels."""
    return min(-0.01, 1.25 * lowest)
