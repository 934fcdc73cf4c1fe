"""What every rank did over time: a Gantt chart of one typical step, or of a few."""

from __future__ import annotations

from collections import Counter

import altair as alt

from manyhands.analysis import groups
from manyhands.core import formatting
from manyhands.core.registry.strategies import STRATEGIES
from manyhands.records.phases import Span
from manyhands.records.record import RunRecord
from manyhands.report import palette
from manyhands.report.charts import common
from manyhands.report.figure import RECORDS, Figure, Panel, Row, limited, tidy
from manyhands.report.findings import Findings

MOST_RUNS, MOST_SPANS, NUMBERED = 4, 600, ("forward", "backward")
MILLISECONDS = "datum.value == 0 ? '0' : format(datum.value, '~g') + ' ms'"


def figure(findings: Findings) -> Figure | None:
    """One panel per strategy, pipelines first: a timeline explains them best."""
    found: dict[str, RunRecord] = {}
    kept = [record for record in findings.records if any(record.timeline)]
    for record in sorted(kept, key=lambda record: _rank(record, findings)):
        found.setdefault(groups.variant(record), record)
    several = [record for record in found.values() if len(record.timeline) > 1] or list(found.values())
    drawn = several[:MOST_RUNS]
    if not drawn:
        return None
    panels = [_panel(record) for record in drawn]
    return Figure(_sentence(drawn[0]), panels, limited(len(kept) - len(drawn), "timeline", RECORDS))


def _rank(record: RunRecord, findings: Findings) -> tuple[tuple[int, ...], int, bool, int, int]:
    """Sort key: strategies in order; for each, the most workers that are not far beyond the cores."""
    traits, known = record.spec.traits, list(STRATEGIES)
    place = known.index(record.spec.strategy) if record.spec.strategy in known else len(known)
    order = (traits.one_worker, not traits.staged, traits.serial, traits.averaging, place)
    too_many = record.spec.ranks > max(4, record.environment.cores)
    other = record.spec.batch != findings.shown_batch(groups.task_name(record))
    return order, int(too_many), other, -record.spec.workers, record.repeat


def _apart(record: RunRecord) -> bool:
    """Whether the workers do not step together, so that their clocks have no common beginning."""
    return record.spec.traits.asynchronous or record.spec.traits.averaging


def aligned(record: RunRecord) -> list[list[Span]]:
    """The timeline from its first moment; of workers that do not step together, from the first of each."""
    begins = [line[0].begin for line in record.timeline if line]
    zero = min(begins, default=0.0)
    moved = []
    for line in record.timeline:
        start = line[0].begin if line and _apart(record) else zero
        moved.append([Span(span.phase, span.begin - start, span.end - start) for span in line])
    return moved


def spans(record: RunRecord) -> list[Row]:
    """Return one row per span; micro-batches are numbered if there are several."""
    cut = record.spec.traits.staged
    several = any(sum(span.phase == "forward" for span in line) > 1 for line in record.timeline)
    data: list[Row] = []
    each_rank = MOST_SPANS // max(1, len(record.timeline))
    for rank, line in enumerate(aligned(record)):
        seen = Counter[str]()
        role = "server" if rank < record.spec.servers else "stage" if cut else "worker"
        number = rank - record.spec.servers if role == "worker" else rank
        for phase, begin, end in line[:each_rank]:
            seen[phase] += 1
            data.append(
                {
                    "variant": groups.variant(record),
                    "rank": f"{role} {number}",
                    "phase": phase,
                    "begin": tidy(1000 * begin),
                    "end": tidy(1000 * end),
                    "ms": tidy(1000 * (end - begin)),
                    "number": str(seen[phase]) if cut and several and phase in NUMBERED else "",
                }
            )
    return data


def _panel(record: RunRecord) -> Panel:
    data = spans(record)
    whole = max(float(row["end"]) for row in data)
    for row in data:  # a number that does not fit into its bar is left out
        if float(row["ms"]) < 0.018 * whole:
            row["number"] = ""  # type: ignore[index]
    used = common.names(data, "phase")
    looks = {name: color for name, color in palette.PHASES.items() if name in used}
    base = common.rows().encode(y=alt.Y("rank:N", sort=None, title=None))
    bars = base.mark_bar(style="gap", height={"band": 0.78}, cornerRadius=1).encode(
        x=alt.X(
            "begin:Q",
            title="time",
            scale=alt.Scale(domain=[0, whole], nice=False),
            axis=alt.Axis(
                tickCount=8, labelExpr="datum.value == 0 ? '0' : format(datum.value, '~g') + ' ms'"
            ),
        ),
        x2="end:Q",
        color=common.fixed("phase", looks),
        tooltip=common.tips(
            ("rank:N", "rank"),
            ("phase:N", "phase"),
            ("number:N", "micro-batch"),
            ("ms:Q", "ms", ".3~g"),
            ("begin:Q", "from (ms)", ".4~g"),
        ),
    )
    numbers = (
        base.transform_filter("datum.number != ''")
        .transform_calculate(middle="(datum.begin + datum.end) / 2")
        .mark_text(fontSize=10)
        .encode(
            x="middle:Q",
            text="number:N",
            color=alt.condition("datum.phase == 'backward'", alt.value("#fff"), alt.value("#10202c")),
        )
    )
    text = _sentence(record)
    title = f"{groups.task_name(record)} · {groups.title(record)}"
    view = common.layered(bars, numbers) if any(row["number"] for row in data) else bars
    note = (
        "These workers do not step together: each row starts at its own first step." if _apart(record) else ""
    )
    return Panel(title, view, {"rows": data}, f"Timeline by rank. {text}", step=30, wide=True, note=note)


def busy(record: RunRecord) -> list[float]:
    """The share of the time shown that each training rank spent on its own work."""
    lines = [line for line in aligned(record)[record.spec.servers :] if line]
    whole = max((line[-1].end for line in lines), default=0.0) or 1.0
    idle = ("wait", "communication")
    return [sum(span.end - span.begin for span in line if span.phase not in idle) / whole for line in lines]


def _took(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else formatting.duration(seconds)


def _sentence(record: RunRecord) -> str:
    shares = busy(record)
    if not shares:
        return ""
    whole = max(span.end for line in aligned(record) for span in line)
    name = f"{groups.title(record)} ({groups.task_name(record)})"
    if len(shares) == 1:
        return f"{name}: {_took(whole)}, of which {formatting.percent(shares[0])} is work."
    most = max(range(len(shares)), key=lambda k: shares[k])
    least = min(range(len(shares)), key=lambda k: shares[k])
    what = "stage" if record.spec.stages > 1 else "worker"
    if shares[most] - shares[least] < 0.05:
        return (
            f"{name}: each {what} works for about {formatting.percent(shares[most])} of the "
            f"{_took(whole)} shown."
        )
    return (
        f"{name}: of the {_took(whole)} shown {what} {most} works for {formatting.percent(shares[most])}, "
        f"{what} {least} for {formatting.percent(shares[least])}."
    )
