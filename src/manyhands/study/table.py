"""A study's cells as rows of numbers, then as a table and an answer in a sentence."""

from __future__ import annotations

from typing import NamedTuple

from manyhands import words
from manyhands.record import RunRecord
from manyhands.study.execute import Cell

HEADER = ("task", "strategy", "workers", "batch", "samples/s", "to target", "samples", "at the end")


class Row(NamedTuple):
    """One cell's numbers."""

    task: str
    strategy: str
    workers: int
    batch: int
    status: str
    samples_per_second: float
    target: float
    target_seconds: float | None
    target_samples: int | None
    metric: float | None
    metric_name: str


def row(record: RunRecord) -> Row:
    """The numbers of a finished cell."""
    spec = record.spec
    return Row(
        spec.task,
        spec.strategy,
        spec.workers,
        spec.batch or 0,
        record.status,
        record.samples_per_second,
        record.target,
        record.target_seconds,
        record.target_samples,
        record.metric,
        record.metric_name,
    )


def draw(cells: list[Cell]) -> list[str]:
    """Aligned columns, numbers to the right."""
    lines = [HEADER]
    for cell in cells:
        if cell.record is None:
            spec = cell.spec
            lines.append(
                (spec.task, spec.strategy, str(spec.workers), str(spec.batch or ""), "failed", "", "", "")
            )
            continue
        numbers = row(cell.record)
        lines.append(
            (
                numbers.task,
                numbers.strategy,
                str(numbers.workers),
                f"{numbers.batch:,}",
                f"{numbers.samples_per_second:,.0f}",
                _to_target(numbers),
                "" if numbers.target_samples is None else f"{numbers.target_samples:,}",
                words.score(numbers.metric, numbers.metric_name),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    return [
        "  ".join(
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _to_target(numbers: Row) -> str:
    if numbers.status == "diverged":
        return "diverged"
    reached = "not reached" if numbers.target_seconds is None else words.duration(numbers.target_seconds)
    return f"{reached} ({words.threshold(numbers.target, numbers.metric_name)})"


def answers(cells: list[Cell]) -> list[str]:
    """For each task the batch and workers that got it trained soonest, and those that ran fastest."""
    rows = [row(cell.record) for cell in cells if cell.record is not None]
    return [
        _answer(task, [numbers for numbers in rows if numbers.task == task])
        for task in dict.fromkeys(r.task for r in rows)
    ]


def _setting(numbers: Row) -> str:
    """`batch 512`, and with how many workers where there are several."""
    return f"batch {numbers.batch}" + (f" on {numbers.workers} workers" if numbers.workers > 1 else "")


def _answer(task: str, rows: list[Row]) -> str:
    fastest = max(rows, key=lambda numbers: numbers.samples_per_second)
    speed = f"{_setting(fastest)} runs fastest ({fastest.samples_per_second:,.0f} samples/s)"
    timed = [(numbers.target_seconds, numbers) for numbers in rows if numbers.target_seconds is not None]
    if not timed:
        return f"{task}: no cell reached {words.threshold(rows[0].target, rows[0].metric_name)}; {speed}"
    seconds, soonest = min(timed, key=lambda pair: pair[0])
    target = words.threshold(soonest.target, soonest.metric_name)
    return f"{task}: {_setting(soonest)} reaches {target} soonest ({words.duration(seconds)}); {speed}"
