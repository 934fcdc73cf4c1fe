"""How often workers must average: every step, every H steps, once per epoch, or once at the end."""

from __future__ import annotations

from manyhands.analysis import groups
from manyhands.claims.base import Claim, Finding, Row, together, unsettled
from manyhands.core import formatting
from manyhands.core.statistics import Summary, summary
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results

LOST = 0.003  # of accuracy: two seeds of these tasks differ this much


def _judge(results: Results) -> Finding:
    runs = [
        record
        for record in results.records
        if record.spec.traits.averaging and groups.higher_is_better(record)  # accuracy, not a loss
    ]
    parts: list[tuple[bool, str]] = []
    table: list[Row] = []
    for task in groups.tasks(runs):
        by_every = _by_every(groups.of_task(runs, task))
        counts = [every for every in by_every if isinstance(every, int) and every > 1]
        if 1 not in by_every or "end" not in by_every or not counts:
            continue
        table += [_row(task, every, records) for every, records in by_every.items()]
        metric = {every: _metric(records) for every, records in by_every.items()}
        each, rarely = metric[1].median, max(counts)
        drop, end = each - metric[rarely].median, each - metric["end"].median
        parts.append(
            (
                drop <= LOST,
                f"{task}: an average every {rarely} steps ends at "
                f"{formatting.percent(metric[rarely].median, 2)}, "
                f"one per step at {formatting.percent(each, 2)}",
            )
        )
        parts.append(
            (
                end > LOST,
                f"one average at the end gives {formatting.percent(metric['end'].median, 2)}"
                + ("" if end > LOST else ", which is no worse"),
            )
        )
    if not parts:
        return unsettled("this needs strategy average with every 1, some number of steps, and end")
    return together(parts, table)


def _by_every(records: list[RunRecord]) -> dict[int | str, list[RunRecord]]:
    found: dict[int | str, list[RunRecord]] = {}
    for record in records:
        every = groups.option(record, record.spec.traits.interval)
        found.setdefault(int(every) if str(every).isdecimal() else str(every), []).append(record)
    return found


def _metric(records: list[RunRecord]) -> Summary:
    return summary([record.metric or 0.0 for record in records])


def _row(task: str, every: int | str, records: list[RunRecord]) -> Row:
    sent = [sum(each["bytes"] for each in record.traffic[-1].values()) for record in records]
    return {
        "task": task,
        "an average every": every,
        "accuracy": formatting.percent(_metric(records).median, 2),
        "samples/s": round(summary([record.throughput for record in records]).median),
        "sent per worker": formatting.size(summary(sent).median),
    }


AVERAGING = Claim(
    "averaging",
    "Workers that average every H steps learn as well as workers that average every step, for H times less "
    "communication; one average at the end does not.",
    "McDonald et al. 2010, Stich 2019, Lin et al. 2020",
    _judge,
)
