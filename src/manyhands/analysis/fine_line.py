"""The fine line: the number of workers from which more workers are slower, or gain less than they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from manyhands.analysis.scaling import Curve, Point, times_as_fast
from manyhands.core import formatting
from manyhands.core.plausible import SEVERAL
from manyhands.core.statistics import Summary

WORTH = 0.5  # a further worker must add half the throughput of one worker, or it costs twice what it adds


class FineLine(NamedTuple):
    """Where more workers stop paying off on a curve."""

    task: str
    variant: str
    kind: str
    fixed: int
    counts: list[int]
    slower_from: int | None  # from this count on, all are slower than the best smaller count
    costlier_from: int | None  # from this count on, a further worker is clearly not worth its cost
    best: int  # the count with the highest throughput
    sentence: str
    crowded_from: int | None = None  # from this count on, more threads than cores
    batch: str = ""  # "batch 256", "128 per worker"
    unclear_from: int | None = None  # from this count on, nobody can say whether a further worker pays


def fine_lines(curves: Sequence[Curve]) -> list[FineLine]:
    return [_fine_line(curve) for curve in curves if curve.points]


def _fine_line(curve: Curve) -> FineLine:
    points = sorted(curve.points, key=lambda point: point.workers)
    best = max(points, key=lambda point: point.throughput.median)
    gains = _gains(points, *_speeds(curve, points))
    line = FineLine(
        *(curve.task, curve.variant, curve.kind, curve.fixed),
        counts=[point.workers for point in points],
        slower_from=_slower_from(points),
        costlier_from=next((count for count, gained in gains if gained.high < 0), None),
        best=best.workers,
        sentence="",
        crowded_from=next((point.workers for point in points if point.crowded), None),
        batch=f"batch {curve.fixed:,}" if curve.kind == "strong" else f"{curve.fixed:,} per worker",
        unclear_from=next((count for count, gained in gains if gained.low <= 0 <= gained.high), None),
    )
    return line._replace(sentence=_sentence(line, points))


def _one_worker(curve: Curve, points: Sequence[Point]) -> Summary:
    """The throughput of one worker: measured, or one worker's share in the smallest count that was run."""
    if points[0].workers == 1:
        return points[0].throughput
    if curve.baseline is not None:
        return curve.baseline.throughput
    first = points[0].throughput
    return first._replace(
        **{name: getattr(first, name) / points[0].workers for name in ("median", "low", "high")}
    )


def _slower_from(points: Sequence[Point]) -> int | None:
    """Return the first count from which all counts are slower than the best smaller one, beyond the noise."""
    found = None
    for at in range(len(points) - 1, 0, -1):
        best = max(points[:at], key=lambda point: point.throughput.median)
        if not all(_slower(point, best) for point in points[at:]):
            break
        found = points[at].workers
    return found


def _slower(point: Point, best: Point) -> bool:
    return _sure(point, best) and times_as_fast(point, best).high < 1


def _sure(*points: Point) -> bool:
    """Whether speeds can be compared: a few measurements on a noisy machine cannot."""
    return all(not point.noisy or point.throughput.n >= SEVERAL for point in points)


def _speeds(curve: Curve, points: Sequence[Point]) -> tuple[list[Summary], Summary]:
    """The speed of every point and that of one worker; as speed-ups if these were measured in pairs."""
    paired = [point.speed_up for point in points if point.cell and point.speed_up]
    if len(paired) == len(points):
        return paired, Summary(1.0, 1.0, 1.0, min(each.n for each in paired))
    return [point.throughput for point in points], _one_worker(curve, points)


def _gains(points: Sequence[Point], speeds: Sequence[Summary], alone: Summary) -> list[tuple[int, Summary]]:
    """What each further worker brings beyond what makes it worth its cost, in the unit of the speeds.

    The ends are those of a difference of independent measurements.
    """
    found = []
    for (fewer, few), (more, many) in pairwise(zip(points, speeds, strict=True)):
        workers = more.workers - fewer.workers
        gained = (many.median - few.median) / workers - WORTH * alone.median
        down = math.hypot(many.median - many.low, few.high - few.median) / workers
        up = math.hypot(many.high - many.median, few.median - few.low) / workers
        low = gained - math.hypot(down, WORTH * (alone.high - alone.median))
        high = gained + math.hypot(up, WORTH * (alone.median - alone.low))
        if not _sure(fewer, more):
            low, high = -math.inf, math.inf
        found.append((more.workers, Summary(gained, low, high, min(few.n, many.n))))
    return found


def _sentence(line: FineLine, points: Sequence[Point]) -> str:
    by_count = {point.workers: point for point in points}
    most = line.counts[-1]
    if line.slower_from is not None:
        fewer = [point for point in points if point.workers < line.slower_from]
        best = max(fewer, key=lambda point: point.throughput.median)
        loss = 1 - times_as_fast(by_count[line.slower_from], best).median
        text = f"{line.slower_from} are {formatting.percent(loss)} slower than {best.workers}"
        return f"More workers do not pay: {text}{_why(line, by_count[line.slower_from])}."
    if line.costlier_from is not None:
        text = (
            f"From {line.costlier_from} workers on a further one brings less than half of what one does alone"
        )
        return f"{text}{_why(line, by_count[line.costlier_from])}."
    if line.unclear_from is not None:
        at = line.counts.index(line.unclear_from)
        before, after = points[at - 1], points[at]
        if not _sure(before, after):
            text = f"Whether {after.workers} workers are faster than {before.workers} is not clear"
            return f"{text}: the machine was noisy while they were measured."
        share = times_as_fast(after, before)
        speed = f"{share.median:.2f}x ({share.low:.2f}x to {share.high:.2f}x) as fast"
        if share.low <= 1 <= share.high:
            return f"{after.workers} workers are not told apart from {before.workers}: {speed}."
        text = f"Whether {after.workers} workers are worth their cost is not clear"
        return f"{text}: they are {speed} as {before.workers}."
    return f"Up to {most} workers, the most that were run, each further one pays."


def _why(line: FineLine, point: Point) -> str:
    """Return a reason only if the line is crossed at the same count as the number of cores."""
    if not point.crowded or line.crowded_from != point.workers:
        return ""
    serving = point.ranks > point.workers
    ranks = f"{point.ranks} processes" if serving else formatting.plural(point.ranks, "worker")
    with_threads = f" with {point.threads} threads each" if point.threads > 1 else ""
    return f", where {ranks}{with_threads} share {formatting.plural(point.cores, 'core')}"
