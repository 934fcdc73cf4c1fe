"""The cells of one task that an answer is about: who takes part, who wins, who is the simplest of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from manyhands.analysis import groups
from manyhands.analysis.candidates import Candidate, Faster, by_speed, by_time, comparison, ranked
from manyhands.analysis.scaling import Point, points
from manyhands.analysis.target import ToTarget, to_target
from manyhands.records.study_results import Results


class Field:
    """The records of one task and the candidates for its answer."""

    def __init__(self, task: str, results: Results) -> None:
        self.task, self.results = task, results
        self.records = groups.of_task(results.records, task)
        everything = to_target(self.records, results.price, results.blocks)
        self.tries = _one_target(everything)
        self.faster: Faster = comparison(results.blocks)
        timed = by_time([each for each in self.tries if not each.diverged])
        self.reached = bool(timed)
        # the fastest first; by speed if nothing reached the target
        self.candidates = timed or by_speed(self._converged(everything), self.records[0].unit)

    @cached_property
    def points(self) -> list[Point]:
        """The speeds of all cells."""
        return points(self.records, self.task, self.results.price, self.results.blocks)

    def _converged(self, tries: Sequence[ToTarget]) -> list[Point]:
        """The cells none of whose runs diverged: a fast setup that does not train is no answer."""
        wild = {(each.variant, each.workers, each.batch) for each in tries if each.diverged}
        return [each for each in self.points if (each.variant, each.workers, each.batch) not in wild]

    @property
    def cores(self) -> int:
        return max(record.environment.cores for record in self.records)

    @property
    def every(self) -> str:
        return f"one worker with all {self.cores} cores as threads"

    @cached_property
    def ranked(self) -> list[list[Candidate]]:
        return ranked(self.candidates, self.faster)

    @property
    def winners(self) -> list[Candidate]:
        """The candidates that are not told apart from the fastest one, which is the first."""
        return self.ranked[0]

    @property
    def best(self) -> Candidate:
        """The simplest winner."""
        return min(self.winners, key=lambda each: each.simplicity)

    @property
    def several(self) -> list[Candidate]:
        return [each for each in self.candidates if each.cell.workers > 1]

    def won(self, candidate: Candidate) -> bool:
        return any(candidate is each for each in self.winners)


def _one_target(tries: Sequence[ToTarget]) -> list[ToTarget]:
    """The cells with the most common target: seconds to different targets cannot be compared."""
    targets = [each.target for each in tries]
    chosen = max(targets, key=lambda target: (targets.count(target), target), default=None)
    return [each for each in tries if each.target == chosen]
