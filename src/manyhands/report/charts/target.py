"""Time to the target by strategy, workers and batch: a map."""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from manyhands.analysis.target import ToTarget
from manyhands.core import formatting
from manyhands.report import palette
from manyhands.report.charts import common, sureness
from manyhands.report.figure import Figure, Panel, Row, limited, tidy
from manyhands.report.findings import Findings

MOST_ROWS, MOST_BATCHES = 28, 12


def figure(findings: Findings) -> Figure | None:
    """One row per strategy and worker count, one column per batch; missed targets are marked."""
    panels, sentences, left = [], [], 0
    for task in findings.tasks:
        mine = findings.compared(task)
        timed = [each for each in mine if _counts(each)]
        if not timed or len(mine) < 2:
            continue
        batches = _kept_batches(mine)
        seen = [each for each in mine if each.batch in batches]
        kept = _fastest_rows(seen)
        left += len({_place(each) for each in seen} - kept)
        data = [_cell(findings, each, timed) for each in seen if _place(each) in kept]
        sentences.append(_sentence(findings, task, timed))
        panels.append(_map(findings, task, data, timed, sentences[-1]))
    if not panels:
        return None
    return Figure(common.sentence(sentences), panels, limited(left, "row"))


def _counts(each: ToTarget) -> bool:
    """Whether a time is shown: not of a cell that also diverged, which the answer does not advise."""
    return each.best_seconds is not None and not each.diverged


def _seconds(each: ToTarget) -> float:
    """Seconds to the target; infinity if it was not reached."""
    return each.best_seconds if each.best_seconds is not None else math.inf


def _place(each: ToTarget) -> tuple[str, int, int]:
    return each.variant, each.workers, each.threads


def _spoken(each: ToTarget) -> str:
    return f"{common.spoken(each.variant, each.workers, each.threads)} at batch {each.batch:,}"


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
    won = {sureness.cell_key(winner) for winner in findings.winners(each.task)}
    row: dict[str, Any] = {
        "variant": each.variant,
        "place": common.place(each.variant, each.workers, each.threads),
        "order": order,
        "workers": each.workers,
        "batch": each.batch,
        "reached": f"{each.reached} of {each.of}",
        "run": common.runs(each.runs),
    }
    seconds = each.best_seconds
    if seconds is None or not _counts(each):
        what, label = ("not timed", "·") if each.reached else ("not reached", "–")
        if each.diverged:
            what, label = f"diverged in {each.diverged} of {each.of} runs", "×"
        return row | {"seconds": None, "label": label, "shown": what, "bright": False, "winner": ""}
    share = (math.log(seconds) - low) / ((high - low) or 1.0)
    winner = sureness.cell_key(each) in won
    return row | {
        "seconds": tidy(seconds),
        "label": common.brief_time(seconds) + (f" {sureness.TIED}" if winner else ""),
        "shown": common.brief_time(seconds),
        "interval": sureness.interval(each.seconds, each.basis, common.brief_time) if each.seconds else "",
        "steps": tidy(each.steps.median) if each.steps else None,
        "winner": "yes" if winner else "",
        "bright": share < 0.45,
    }


def _map(findings: Findings, task: str, data: list[Row], timed: list[ToTarget], text: str) -> Panel:
    tip = common.tips(
        ("place:N", "strategy"),
        ("batch:O", "batch"),
        ("shown:N", "time to target"),
        ("interval:N", "95 % interval"),
        ("steps:Q", "steps", ",.0f"),
        ("reached:N", "runs that reached it"),
        common.RUN,
    )
    base = common.rows().encode(
        x=alt.X("batch:O", title="batch", axis=alt.Axis(labelAngle=0, domain=False, ticks=False)),
        y=alt.Y("place:N", title=None, sort=alt.EncodingSortField("order", op="min")),
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
    target = formatting.threshold(timed[0].target, timed[0].metric_name)
    return Panel(
        f"{task} · time to {target} {timed[0].metric_name}",
        common.layered(cells.transform_filter("datum.seconds != null"), numbers, nothing),
        {"rows": data},
        f"Map of the time to the target by strategy, workers and batch. {text} "
        "A dash: not reached; a dot: not timed; a cross: a run diverged.",
        step=27,
        wide=len({row["batch"] for row in data}) > 4,
        note=sureness.TIED_NOTE if len(findings.winners(task)) > 1 else sureness.ONE_NOTE,
    )


def _sentence(findings: Findings, task: str, timed: list[ToTarget]) -> str:
    """Who is first, as the answer has it, and who is last."""
    won = {sureness.cell_key(each) for each in findings.winners(task)}
    first = sorted((each for each in timed if sureness.cell_key(each) in won), key=_seconds)
    slow = max(timed, key=_seconds)
    parts = [f"{_spoken(each)} ({common.brief_time(_seconds(each))})" for each in first]
    text = f"{task}: {sureness.fastest(parts)}" if parts else f"{task}: no cell is the fastest"
    if sureness.cell_key(slow) not in won:
        text += f"; the slowest, {_spoken(slow)}, takes {common.brief_time(_seconds(slow))}"
    return text + "."
