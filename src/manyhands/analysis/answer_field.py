"""The cells of one task that an answer is about: who takes part, who wins, who is the simplest of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from manyhands.analysis import groups
from manyhands.analysis.candidates import Candidate, Faster, by_speed, by_time, comparison, ranked
from manyhands.analysis.scaling import Point, points
from manyhands.analysis.target import ToTarget, to_target
from manyhands.analysis.trajectories import same_steps
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
        self.untried: list[Candidate] = []  # not compared: nobody knows what they learn
        if not self.tries:
            self._set_apart_untried()

    @cached_property
    def points(self) -> list[Point]:
        """The speeds of all cells."""
        return points(self.records, self.task, self.results.price, self.results.blocks)

    def _converged(self, tries: Sequence[ToTarget]) -> list[Point]:
        """The cells none of whose runs diverged: a fast setup that does not train is no answer."""
        wild = {(each.variant, each.workers, each.batch) for each in tries if each.diverged}
        return [each for each in self.points if (each.variant, each.workers, each.batch) not in wild]

    def _set_apart_untried(self) -> None:
        """Where only speed was measured, compare those that make the same steps, if there are any."""
        same = {groups.key(record)[:4] for record in self.records if same_steps(record)}
        known = [each for each in self.candidates if _key(each) in same]
        if known:
            self.untried = [each for each in self.candidates if _key(each) not in same]
            self.candidates = known

    @property
    def advisable(self) -> bool:
        """Whether it is known that the best candidate learns: it did, or it makes the steps of one worker.

        Steps with another batch are other steps.
        """
        if self.reached or self.tries or not self.candidates:
            return self.reached
        same = any(same_steps(record) for record in self.records)
        return same and len({each.cell.batch for each in self.candidates}) == 1

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


def _key(candidate: Candidate) -> tuple[str, int, int, int]:
    cell = candidate.cell
    return cell.variant, cell.workers, cell.threads, cell.batch


def _one_target(tries: Sequence[ToTarget]) -> list[ToTarget]:
    """The cells with the most common target: seconds to different targets cannot be compared."""
    targets = [each.target for each in tries]
    chosen = max(targets, key=lambda target: (targets.count(target), target), default=None)
    return [each for each in tries if each.target == chosen]
