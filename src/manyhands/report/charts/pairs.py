"""How sure: the ratio of each cell to the baseline round by round, for cells that were measured in pairs."""

from __future__ import annotations

import math
from typing import NamedTuple

import altair as alt

from manyhands.analysis import groups, pairs
from manyhands.analysis.pairs import Compared, Lane
from manyhands.core import formatting
from manyhands.records.record import RunRecord
from manyhands.report.charts import common, sureness
from manyhands.report.figure import Figure, Panel, Row, limited, tidy
from manyhands.report.findings import Findings

MOST = 24  # cells per panel


class PairedCell(NamedTuple):
    """A cell and what its rounds say about its speed over the baseline's."""

    record: RunRecord
    over: Compared
    ratios: list[float]  # by round
    leads: bool  # not told apart from the fastest of its lane


def figure(findings: Findings) -> Figure | None:
    """One panel per baseline: a dot per round, the interval, and the mark of those that lead."""
    panels, sentences, left = [], [], 0
    for lane in findings.lanes:
        base = findings.by_cell.get(lane.baseline)
        found = cells(findings, lane)
        if base is None or not found:
            continue
        sentences.append(_sentence(base, found))
        panels.append(_panel(findings, base, found[:MOST], sentences[-1]))
        left += len(found) - MOST
    return Figure(common.sentence(sentences), panels, limited(left, "cell")) if panels else None


def cells(findings: Findings, lane: Lane) -> list[PairedCell]:
    """The cells of a lane, the fastest first."""
    leading = findings.lane_leaders(lane)
    found = []
    for cell, values in lane.values.items():
        record, over = findings.by_cell.get(cell), pairs.compared(lane, cell, lane.baseline)
        if record is not None and over is not None:
            ratios = [math.exp(value) for value in values.values()]
            found.append(PairedCell(record, over, ratios, cell in leading))
    return sorted(found, key=lambda each: -each.over.ratio.median)


def _name(record: RunRecord) -> str:
    place = common.place(groups.variant(record), record.spec.workers, groups.threads(record))
    label = f" · {record.label}" if record.label and record.label not in place else ""
    return f"{place} · batch {groups.batch(record):,}{label}"


def _cell(each: PairedCell) -> Row:
    ratio = each.over.ratio
    return {
        "variant": groups.variant(each.record),
        "title": _name(each.record),
        "ratio": tidy(ratio.median),
        "low": tidy(ratio.low),
        "high": tidy(ratio.high),
        "end": tidy(max(ratio.high, *each.ratios)),  # where the label begins
        "label": f"{ratio.median:.2f}x" + (f" {sureness.TIED}" if each.leads else ""),
        "interval": f"{ratio.low:.2f}x to {ratio.high:.2f}x, from {_rounds([each])}",
        "rounds": each.over.rounds,
        "spread": tidy(each.over.spread),
        "run": common.short(each.record.run),
    }


def _dots(each: PairedCell) -> list[Row]:
    variant, title = groups.variant(each.record), _name(each.record)
    return [
        {"variant": variant, "title": title, "round": k, "ratio": tidy(ratio)}
        for k, ratio in enumerate(each.ratios, 1)
    ]


def _panel(findings: Findings, base: RunRecord, found: list[PairedCell], text: str) -> Panel:
    data = [_cell(each) for each in found]
    dots = [dot for each in found for dot in _dots(each)]
    tip = common.tips(
        ("title:N", "cell"),
        ("label:N", "times the baseline"),
        ("interval:N", "95 % interval"),
        ("spread:Q", "varies from round to round by", ".1%"),
        common.RUN,
    )
    ends = [float(value) for row in data for value in (row["low"], row["end"], 1.0)]
    ends += [float(dot["ratio"]) for dot in dots]
    low, high = min(ends), max(ends)
    room = [max(0.0, low - 0.05 * (high - low)), high + 0.25 * (high - low)]  # labels stand on the right

    def at(field: str) -> alt.X:  # the same scale in all layers, or theirs would be joined with zero
        scale, axis = alt.Scale(domain=room, nice=False, zero=False), alt.Axis(grid=True, tickCount=6)
        return alt.X(f"{field}:Q", title="times as fast as the baseline", scale=scale, axis=axis)

    y = alt.Y("title:N", sort=None, title=None)
    color, bands = common.color(findings.looks, data, legend=False), common.rows().encode(y=y)
    points = common.rows("dots").mark_point(size=26, opacity=0.55).encode(y=y, x=at("ratio"), color=color)
    view = common.layered(
        common.rows("one").mark_rule(style="guide").encode(x=at("ratio")),
        points.encode(tooltip=common.tips(("round:Q", "round"), ("ratio:Q", "ratio", ".3f"))),
        bands.mark_rule(style="ink", strokeWidth=1.6).encode(x=at("low"), x2="high:Q"),
        bands.mark_tick(style="ink", thickness=2.4, size=15).encode(x=at("ratio"), tooltip=tip),
        bands.mark_text(style="label", align="left", dx=7).encode(x=at("end"), text="label:N"),
    )
    mark = sureness.TIED_NOTE if sum(each.leads for each in found) > 1 else sureness.ONE_NOTE
    lines = f"Dots: single rounds. Thin lines: 95 % intervals from {_rounds(found)}. Dashed: the baseline."
    return Panel(
        f"{groups.task_name(base)} · over {groups.title(base)}",
        view,
        {"rows": data, "dots": dots, "one": [{"ratio": 1}]},
        f"Speed over the baseline by round. {text}",
        step=28,
        wide=True,
        note=f"{lines} {mark}." if any(each.leads for each in found) else lines,
    )


def _rounds(found: list[PairedCell]) -> str:
    """`6 paired rounds`, `3 to 12 paired rounds`."""
    counts = sorted({each.over.rounds for each in found})
    if len(counts) == 1:
        return formatting.plural(counts[0], "paired round")
    return f"{counts[0]} to {counts[-1]} paired rounds"


def _sentence(base: RunRecord, found: list[PairedCell]) -> str:
    """Who leads, and how much a ratio varies from round to round."""
    first, task = found[0].over.ratio, groups.task_name(base)
    spread = sorted(each.over.spread for each in found)[len(found) // 2]
    leading = [_spoken(each.record) for each in found if each.leads]
    if leading:
        which = "it runs" if len(leading) == 1 else "the first runs"
        text = f"{task}: by samples per second, {sureness.fastest(leading)}; {which}"
    else:
        text = f"{task}: nothing is faster than {_spoken(base)}; {_spoken(found[0].record)} runs"
    return (
        f"{text} {first.median:.2f}x ({first.low:.2f} to {first.high:.2f}) as fast as {_spoken(base)}. From "
        f"round to round a ratio varies by {formatting.percent(spread, 1)}."
    )


def _spoken(record: RunRecord) -> str:
    return common.spoken(groups.variant(record), record.spec.workers, groups.threads(record))
