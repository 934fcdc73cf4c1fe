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
    text = (
        f"The machine was at most {formatting.percent(worst)} slower than at its best; "
        + (
            f"{noisy} of {len(found)} calibrations found it"
            if noisy
            else f"none of {len(found)} calibrations found it"
        )
        + f" noisy (over {formatting.percent(NOISY)} slower)."
    )
    base = common.rows().encode(
        x=alt.X("minutes:Q", title="minutes since the study began", axis=alt.Axis(tickCount=8)),
        y=alt.Y(
            "slower:Q",
            title="slower than at its best",
            axis=alt.Axis(format="%", tickCount=5),
            scale=alt.Scale(domainMin=0),
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
    level = common.rows("limit").encode(y="slower:Q")
    view = common.layered(
        level.mark_rule(style="guide"),
        level.mark_text(
            style="note", align="left", x=4, dy=-6, text=f"noisy beyond {formatting.percent(NOISY)}"
        ),
        base.mark_line(strokeWidth=1, strokeOpacity=0.5, color="#0072b2"),
        base.mark_point(size=40).encode(color=color, shape=shape, tooltip=tip),
    )
    limit: list[Row] = [{"slower": NOISY}] if worst > NOISY / 3 else []
    return Figure(text, [Panel("", view, {"rows": data, "limit": limit}, text, 200, wide=True)])
