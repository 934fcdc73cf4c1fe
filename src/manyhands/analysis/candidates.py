"""The cells of a study that are compared for the answer, by time to the target or by throughput."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from manyhands.analysis.scaling import MILLION, Point
from manyhands.analysis.target import ToTarget
from manyhands.core import formatting
from manyhands.core.registry.strategies import ONE_WORKER
from manyhands.core.statistics import Summary, ratio


class Candidate(NamedTuple):
    """A cell, and how long it takes to reach the target or to train on a million samples."""

    cell: ToTarget | Point
    pace: Summary  # seconds to the target, or per million samples
    shown: str  # "97 % after 4.9 s", "1,730 images/s"
    brief: str  # "4.9 s", "1,730 images/s"

    @property
    def name(self) -> str:
        """`allreduce, 2 workers, batch 256`, or `one worker with 2 threads, batch 256`."""
        cell = self.cell
        if cell.variant != ONE_WORKER:
            return f"{cell.variant}, {cell.workers_text}, batch {cell.batch}"
        many = "one thread" if cell.threads == 1 else f"{cell.threads} threads"
        return f"one worker with {many}, batch {cell.batch}"

    @property
    def spent(self) -> float:
        """Worker-seconds that the cell takes."""
        return self.cell.worker_seconds or 0.0

    def alone(self, threads: int) -> bool:
        """Whether this is one worker with this number of threads and no other options."""
        return self.cell.variant == ONE_WORKER and self.cell.threads == threads


def by_time(tries: Sequence[ToTarget]) -> list[Candidate]:
    """The cells that reached the target, the fastest first."""
    return sorted(filter(None, map(_timed, tries)), key=lambda each: (each.pace.median, each.name))


def by_speed(points: Sequence[Point], unit: str) -> list[Candidate]:
    """All cells that were timed, the fastest first."""
    found = []
    for point in points:
        rate = point.throughput
        pace = Summary(MILLION / rate.median, MILLION / rate.high, MILLION / rate.low, rate.n)
        shown = formatting.rate(rate.median, unit)
        found.append(Candidate(point, pace, shown, shown))
    return sorted(found, key=lambda each: (each.pace.median, each.name))


def faster(one: Candidate, other: Candidate) -> Summary:
    """How many times as fast `one` is as `other`."""
    return ratio(other.pace, one.pace)


def first(candidates: Sequence[Candidate], threads: int) -> Candidate | None:
    """The fastest candidate with one worker and the given number of threads."""
    return next((each for each in candidates if each.alone(threads)), None)


def _timed(cell: ToTarget) -> Candidate | None:
    seconds = cell.best_seconds
    if seconds is None:
        return None
    pace = cell.seconds or Summary(seconds, seconds, seconds, 1)
    goal = formatting.threshold(cell.target, cell.metric_name)
    some = f" in {cell.reached} of {cell.of} runs" if cell.reached < cell.of else ""
    brief = formatting.duration(seconds)
    return Candidate(cell, pace, f"{goal} after {brief}{some}", brief)
