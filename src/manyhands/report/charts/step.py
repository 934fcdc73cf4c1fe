"""What a step consists of: time by phase, bytes exchanged, memory used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import altair as alt

from manyhands.analysis.breakdown import Breakdown
from manyhands.core import formatting
from manyhands.core.registry.strategies import ONE_WORKER
from manyhands.report import palette
from manyhands.report.charts import common
from manyhands.report.figure import Figure, Panel, Row, limited, tidy
from manyhands.report.findings import Findings

MOST = 18  # bars per panel
LOST = ("communication", "wait", "data", "other")
NEXT_TO_NOTHING = 10_000  # bytes for 1,000 samples: a flag or a counter, no gradients


def _shown(findings: Findings, task: str) -> tuple[list[Breakdown], int]:
    """One run per strategy and worker count, preferably at the most common batch; and how many are left."""
    mine = [each for each in findings.breakdowns if each.task == task]
    batch = findings.shown_batch(task)
    found: dict[tuple[str, int, str], Breakdown] = {}
    for each in sorted(mine, key=lambda each: (each.batch != batch, each.batch)):
        found.setdefault((each.variant, each.workers, _threads(findings, each)), each)
    order = {name: number for number, name in enumerate(findings.variants)}
    kept = sorted(found.values(), key=lambda each: (order.get(each.variant, 0), each.workers, each.title))
    return kept[:MOST], len(kept) - MOST


def _threads(findings: Findings, each: Breakdown) -> str:
    record = findings.by_run.get(each.run)
    return str(record.environment.threads) if record and each.variant == ONE_WORKER else ""


def _name(findings: Findings, each: Breakdown, batch: int | None) -> str:
    name = common.place(each.variant, each.workers, int(_threads(findings, each) or 1))
    return name if each.batch == batch else f"{name} · batch {each.batch:,}"


def _spoken(findings: Findings, each: Breakdown) -> str:
    return common.spoken(each.variant, each.workers, int(_threads(findings, each) or 1))


def _each_task(
    findings: Findings, draw: Callable[[str, list[Breakdown], dict[str, str]], tuple[Panel, str] | None]
) -> Figure | None:
    panels, sentences, left = [], [], 0
    for task in findings.tasks:
        shown, more = _shown(findings, task)
        batch = findings.shown_batch(task)
        if shown and (drawn := draw(task, shown, {each.run: _name(findings, each, batch) for each in shown})):
            panels.append(drawn[0])
            sentences.append(drawn[1])
            left += max(0, more)
    return Figure(common.sentence(sentences), panels, limited(left, "bar")) if panels else None


def breakdown(findings: Findings) -> Figure | None:
    """Phases of a step as stacked bars, per thousand samples so that batches can be compared."""

    def draw(task: str, shown: list[Breakdown], names: dict[str, str]) -> tuple[Panel, str] | None:
        data: list[Row] = [
            {
                "variant": each.variant,
                "title": names[each.run],
                "phase": phase,
                "order": order,
                "ms": tidy(1e6 * each.phases[phase] / each.batch),
                "share": tidy(each.phases[phase] / (sum(each.phases.values()) or 1.0)),
                "step": formatting.duration(each.step_seconds),
                "run": common.short(each.run),
            }
            for each in shown
            for order, phase in enumerate(palette.PHASES)
            if each.phases.get(phase, 0.0) > 0
        ]
        if not data:
            return None
        text = _lost(findings, task, shown)
        used = common.names(data, "phase")
        looks = {name: color for name, color in palette.PHASES.items() if name in used}
        bars = (
            common.rows()
            .mark_bar(style="gap", height={"band": 0.72}, cornerRadiusEnd=0)
            .encode(
                y=alt.Y("title:N", sort=None, title=None),
                x=alt.X(
                    "sum(ms):Q", title="milliseconds for 1,000 samples", axis=alt.Axis(grid=True, tickCount=5)
                ),
                color=common.fixed("phase", looks),
                order=alt.Order("order:Q"),
                tooltip=common.tips(
                    ("title:N", "strategy"),
                    ("phase:N", "phase"),
                    ("share:Q", "share of the step", ".1%"),
                    ("ms:Q", "ms for 1,000 samples", ".3~g"),
                    ("step:N", "time of a step"),
                    common.RUN,
                ),
            )
        )
        panel = Panel(task, bars, {"rows": data}, f"Time of a step by phase. {text}", step=25)
        return panel, text

    return _each_task(findings, draw)


def _lost(findings: Findings, task: str, shown: list[Breakdown]) -> str:
    """Say which strategy loses most, and to which phase."""
    worst: tuple[float, str, str] = (0.0, "", "")
    for each in shown:
        whole = sum(each.phases.values()) or 1.0
        for phase in LOST:
            worst = max(worst, (each.phases.get(phase, 0.0) / whole, phase, _spoken(findings, each)))
    share, phase, name = worst
    if share < 0.05:
        return f"{task}: no strategy loses more than 5 % of its step to communication, waiting or data."
    words = {"wait": "waiting for others", "data": "waiting for data", "other": "other things"}
    most = ", more than any other" if len(shown) > 1 else ""
    return (
        f"{task}: {name} spends {formatting.percent(share)} of its step on {words.get(phase, phase)}{most}."
    )


def communication(findings: Findings) -> Figure | None:
    """Bytes that a worker exchanges per thousand samples."""

    def draw(task: str, shown: list[Breakdown], names: dict[str, str]) -> tuple[Panel, str] | None:
        moving = [each for each in shown if _moved(each) >= NEXT_TO_NOTHING]
        if not moving:
            return None
        data: list[Row] = [
            {
                "variant": each.variant,
                "title": names[each.run],
                "megabytes": tidy(each.bytes_per_step / each.batch / 1e3),
                "shown": f"{formatting.size(each.bytes_per_step)} per step",
                "messages": tidy(each.messages_per_step),
                "run": common.short(each.run),
            }
            for each in moving
        ]
        most, least = (pick(moving, key=lambda each: each.bytes_per_step / each.batch) for pick in (max, min))
        text = f"{task}: {_spoken(findings, most)} moves {formatting.size(_moved(most))} for 1,000 samples"
        if least is not most:
            text += f", {_spoken(findings, least)} {formatting.size(_moved(least))}"
        silent = [names[each.run] for each in shown if _moved(each) < NEXT_TO_NOTHING]
        note = f"Almost nothing, and not drawn: {'; '.join(silent)}." if silent else ""
        return _bars(
            *(findings, task, data, "megabytes:Q", "megabytes for 1,000 samples", "Communication"),
            text + ".",
            note=note,
        )

    return _each_task(findings, draw)


def memory(findings: Findings) -> Figure | None:
    """The memory of the largest rank as a bar, and of every rank as a tick."""

    def draw(task: str, shown: list[Breakdown], names: dict[str, str]) -> tuple[Panel, str] | None:
        known = [each for each in shown if each.memory > 0]
        if not known:
            return None
        data: list[Row] = [
            {
                "variant": each.variant,
                "title": names[each.run],
                "megabytes": tidy(each.memory / 1e6),
                "shown": _taken(findings, each),
                "messages": None,
                "run": common.short(each.run),
            }
            for each in known
        ]
        ranks: list[Row] = [
            {"variant": each.variant, "title": names[each.run], "rank": rank, "megabytes": tidy(taken / 1e6)}
            for each in known
            if each.run in findings.by_run
            for rank, taken in enumerate(findings.by_run[each.run].memory)
        ]
        most, least = (pick(known, key=lambda each: each.memory) for pick in (max, min))
        text = f"{task}: a rank of {_spoken(findings, most)} takes {_taken(findings, most)}"
        if most.memory > least.memory:
            text += f", of {_spoken(findings, least)} {_taken(findings, least)}"
        return _bars(findings, task, data, "megabytes:Q", "megabytes per rank", "Memory", text + ".", ranks)

    return _each_task(findings, draw)


def _taken(findings: Findings, each: Breakdown) -> str:
    """The memory of the largest rank, with a note if it is GPU memory."""
    record = findings.by_run.get(each.run)
    on_gpu = record is not None and record.memory_of == "device"
    return formatting.size(each.memory) + (" of the GPU" if on_gpu else "")


def _bars(
    findings: Findings,
    task: str,
    data: list[Row],
    field: str,
    axis: str,
    what: str,
    text: str,
    ranks: list[Row] | None = None,
    note: str = "",
) -> tuple[Panel, str]:
    y = alt.Y("title:N", sort=None, title=None)
    tip: Any = common.tips(("title:N", "strategy"), ("shown:N", what.lower()), common.RUN)
    if data[0]["messages"] is not None:
        tip.insert(2, alt.Tooltip("messages:Q", title="messages per step", format=",.3~g"))
    base = common.rows().encode(y=y)
    bars = base.mark_bar(height={"band": 0.6}).encode(
        x=alt.X(field, title=axis, axis=alt.Axis(grid=True, tickCount=5)),
        color=common.color(findings.looks, data, legend=False),
        tooltip=tip,
    )
    layers: list[alt.Chart] = [bars]
    if ranks:
        mark = common.rows("ranks").encode(y=y, x=field).mark_tick(style="ink", thickness=1.5, size=9)
        layers.append(
            mark.encode(tooltip=common.tips(("title:N", "run"), ("rank:Q", "rank"), (field, "MB", ",.0f")))
        )
    extra = {"ranks": ranks} if ranks else {}
    panel = Panel(
        task, common.layered(*layers), {"rows": data, **extra}, f"{what}. {text}", step=25, note=note
    )
    return panel, text


def _moved(each: Breakdown) -> float:
    """Bytes exchanged per 1,000 samples."""
    return 1e3 * each.bytes_per_step / each.batch
