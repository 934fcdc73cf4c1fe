"""Staleness: how old the gradients of asynchronous strategies are, and what that costs in samples."""

from __future__ import annotations

import altair as alt

from manyhands.analysis.asynchrony import Asynchrony
from manyhands.report.charts import common
from manyhands.report.figure import RECORDS, Figure, Panel, Row, limited, tidy
from manyhands.report.findings import Findings

MOST_STALE, MOST_KINDS = 24, 10


def figure(findings: Findings) -> Figure | None:
    """Two panels per task: a histogram of staleness, and samples to the target by mean staleness."""
    panels, sentences, left = [], [], 0
    for task in findings.tasks:
        mine = [each for each in findings.asynchronous if each.task == task]
        batch = findings.shown_batch(task)
        stale = sorted(
            (each for each in mine if each.histogram), key=lambda each: (each.batch != batch, each.batch)
        )
        first: dict[tuple[str, int], Asynchrony] = {}
        for each in stale:
            first.setdefault((each.variant, each.workers), each)
        if not any(each.staleness > 0 for each in stale):
            continue
        shown = list(first.values())[:MOST_KINDS]
        left += len(stale) - len(shown)
        sentences.append(_sentence(task, mine))
        panels.append(_histogram(findings, task, shown, sentences[-1]))
        if scatter := _scatter(findings, task, mine, sentences[-1]):
            panels.append(scatter)
    return Figure(common.sentence(sentences), panels, limited(left, "histogram", RECORDS)) if panels else None


def _histogram(findings: Findings, task: str, shown: list[Asynchrony], text: str) -> Panel:
    data: list[Row] = []
    for each in shown:
        total = sum(each.histogram.values())
        most = min(max(each.histogram), MOST_STALE)
        for stale in range(most + 1):
            count = each.histogram.get(stale, 0)
            if stale == MOST_STALE:
                count = sum(n for age, n in each.histogram.items() if age >= stale)
            data.append(
                {
                    "variant": each.variant,
                    "title": common.place(each.variant, each.workers),
                    "staleness": stale,
                    "share": tidy(count / total),
                    "mean": tidy(each.staleness),
                }
            )
    most_share = max(float(row["share"]) for row in data)
    tip = common.tips(
        ("title:N", "strategy"),
        ("staleness:Q", "updates behind"),
        ("share:Q", "share of updates", ".1%"),
        ("mean:Q", "mean", ".2f"),
    )
    room = alt.Scale(padding=1.2)  # circles at the ends must not lie on the names
    x = alt.X("staleness:O", title="staleness (updates behind)", scale=room, axis=alt.Axis(labelAngle=0))
    # circles whose area is the share: one row per strategy, so that none hides another
    view = (
        common.rows()
        .mark_circle(opacity=0.95)
        .encode(
            x=x,
            y=alt.Y("title:N", sort=None, title=None, axis=alt.Axis(grid=True)),
            size=alt.Size("share:Q", scale=alt.Scale(domain=[0, most_share], range=[0, 400]), legend=None),
            color=common.color(findings.looks, data, legend=False),
            tooltip=tip,
        )
    )
    return Panel(
        f"{task} · how stale", view, {"rows": data}, f"Share of updates by staleness. {text}", step=40
    )


def _scatter(findings: Findings, task: str, mine: list[Asynchrony], text: str) -> Panel | None:
    data: list[Row] = [
        {
            "variant": each.variant,
            "workers": each.workers,
            "batch": each.batch,
            "staleness": tidy(each.staleness),
            "samples_ratio": tidy(each.samples_ratio),
            "seconds_ratio": tidy(each.seconds_ratio),
        }
        for each in [each for each in mine if each.samples_ratio is not None and each.same_recipe][:400]
    ]
    others = {each.variant for each in mine if each.samples_ratio is not None and not each.same_recipe}
    if not any(row["staleness"] for row in data):
        return None
    tip = common.tips(
        ("variant:N", "strategy"),
        ("workers:Q", "workers"),
        ("batch:Q", "batch", ",d"),
        ("staleness:Q", "mean staleness", ".2f"),
        ("samples_ratio:Q", "samples, synchronous = 1", ".2f"),
        ("seconds_ratio:Q", "seconds, synchronous = 1", ".2f"),
    )
    one = common.rows("one").mark_rule(style="guide").encode(y="samples_ratio:Q")
    dots = (
        common.rows()
        .mark_point(size=80, opacity=0.85)
        .encode(
            x=alt.X(
                "staleness:Q",
                title="mean staleness (updates)",
                scale=alt.Scale(nice=False, padding=14),
                axis=alt.Axis(tickCount=6),
            ),
            y=alt.Y(
                "samples_ratio:Q",
                title="samples to target, synchronous = 1",
                scale=alt.Scale(zero=False, padding=12),
            ),
            color=common.color(findings.looks, data),
            shape=common.shape(findings.looks, data),
            tooltip=tip,
        )
    )
    return Panel(
        f"{task} · what it costs",
        common.layered(one, dots),
        {"rows": data, "one": [{"samples_ratio": 1}]},
        f"Samples to the target against mean staleness. {text}",
        note="Dashed: as many samples as the synchronous way."
        + (
            f" Not drawn, because their recipe is another one: {', '.join(sorted(others))}." if others else ""
        ),
    )


def _sentence(task: str, mine: list[Asynchrony]) -> str:
    most = max(mine, key=lambda each: each.staleness)
    text = (
        f"{task}: gradients of {common.spoken(most.variant, most.workers)} at batch {most.batch:,} "
        f"are {most.staleness:.1f} updates old on average"
    )
    if most.samples_ratio is None:
        return text + "; what that costs is unknown, because no pair of runs reached the target."
    if not most.same_recipe:
        return text + "; what that costs is unknown, because the synchronous way had another recipe."
    return f"{text}; it took {most.samples_ratio:.2f} times the samples of the synchronous way."
