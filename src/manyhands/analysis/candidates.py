"""The cells of a study that are compared for the answer, and which of them are not told apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from manyhands.analysis import groups, pairs
from manyhands.analysis.scaling import MILLION, Point
from manyhands.analysis.target import ToTarget
from manyhands.core import formatting
from manyhands.core.registry.strategies import ONE_WORKER
from manyhands.core.statistics import Summary, ratio
from manyhands.records.study_results import Block


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

    @property
    def simplicity(self) -> tuple[int, bool, bool, bool, int, int]:
        """The smallest is the simplest: few workers, `single`, synchronous, exact, few ranks and threads."""
        cell, traits = self.cell, groups.traits_of(self.cell.variant)
        return (
            *(cell.workers, not traits.one_worker, traits.asynchronous, not traits.exact),
            *(cell.ranks, cell.threads),
        )

    def alone(self, threads: int) -> bool:
        """Whether this is one worker with this number of threads and no other options."""
        cell = self.cell
        return groups.one_plain_worker(cell.variant, cell.workers) and cell.threads == threads


Faster = Callable[[Candidate, Candidate], Summary]  # how many times as fast the first is as the second


def by_time(tries: Sequence[ToTarget]) -> list[Candidate]:
    """The cells that reached the target, the fastest first."""
    return sorted(filter(None, map(_timed, tries)), key=_order)


def by_speed(points: Sequence[Point], unit: str) -> list[Candidate]:
    """All cells that were timed, the fastest first."""
    found = []
    for point in points:
        rate = point.throughput
        pace = Summary(MILLION / rate.median, MILLION / rate.high, MILLION / rate.low, rate.n)
        shown = formatting.rate(rate.median, unit)
        found.append(Candidate(point, pace, shown, shown))
    return sorted(found, key=_order)


def comparison(blocks: Sequence[Block]) -> Faster:
    """How cells are compared: in pairs where they were measured so.

    Two cells that make the same steps differ in nothing but speed. Otherwise the samples that each of them
    needs add their uncertainty.
    """

    def faster(one: Candidate, other: Candidate) -> Summary:
        mine, theirs = one.cell, other.cell
        paired = pairs.compare_cells(blocks, mine.cell, theirs.cell) if mine.cell and theirs.cell else None
        if paired is None:
            return ratio(other.pace, one.pace)
        if not isinstance(mine, ToTarget) or not isinstance(theirs, ToTarget) or mine.runs == theirs.runs:
            return paired.ratio
        assert mine.samples is not None
        assert theirs.samples is not None
        return ratio(paired.ratio, ratio(mine.samples, theirs.samples))

    return faster


def tied(candidates: Sequence[Candidate], faster: Faster) -> list[Candidate]:
    """The candidates that are not told apart from the fastest one, which is the first."""
    return [each for each in candidates if each is candidates[0] or faster(candidates[0], each).low <= 1]


def ranked(candidates: Sequence[Candidate], faster: Faster) -> list[list[Candidate]]:
    """The winners, then those that are not told apart from the fastest of the others, and so on."""
    found, left = [], list(candidates)
    while left:
        found.append(tied(left, faster))
        left = [each for each in left if not any(each is taken for taken in found[-1])]
    return found


def first(candidates: Sequence[Candidate], threads: int) -> Candidate | None:
    """The fastest candidate with one worker and the given number of threads."""
    return next((each for each in candidates if each.alone(threads)), None)


def _order(candidate: Candidate) -> tuple[float, str]:
    return candidate.pace.median, candidate.name


def _timed(cell: ToTarget) -> Candidate | None:
    if cell.seconds is None:
        return None
    goal = formatting.threshold(cell.target, cell.metric_name)
    some = f" in {cell.reached} of {cell.of} runs" if cell.reached < cell.of else ""
    brief = formatting.duration(cell.seconds.median)
    return Candidate(cell, cell.seconds, f"{goal} after {brief}{some}", brief)
