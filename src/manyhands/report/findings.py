"""The analyses of one study, each computed once for all charts, tables and sentences.

Who is ahead is decided here only: no chart looks for a winner of its own, so no two sections disagree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from manyhands.analysis import (
    answer,
    asynchrony,
    breakdown,
    candidates,
    fine_line,
    generalization,
    groups,
    noise_scale,
    pairs,
    regimes,
    scaling,
    target,
)
from manyhands.analysis.rows import rows as flat_rows
from manyhands.analysis.verdicts import Verdict, study_verdicts, verdicts
from manyhands.core.registry.strategies import ONE_WORKER
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results
from manyhands.report import palette


class Findings:
    """The analyses of one study, computed on first use."""

    most_tasks = 6  # tasks with panels of their own

    def __init__(self, results: Results) -> None:
        self.results = results
        self.records = results.records

    @cached_property
    def tasks(self) -> list[str]:
        """The tasks that are drawn."""
        return groups.tasks(self.records)[: self.most_tasks]

    @cached_property
    def variants(self) -> list[str]:
        """The variants of all records, `single` first."""
        found = dict.fromkeys(groups.variant(record) for record in self.records)
        return sorted(found, key=lambda name: name != ONE_WORKER)

    @cached_property
    def looks(self) -> dict[str, palette.Look]:
        """Color, shape and dash of each variant."""
        return palette.looks(self.variants)

    @cached_property
    def by_run(self) -> dict[str, RunRecord]:
        """Records by run folder."""
        return {record.run: record for record in self.records}

    @cached_property
    def by_cell(self) -> dict[str, RunRecord]:
        """Records by the key of their cell."""
        return {record.cell: record for record in self.records if record.cell is not None}

    @cached_property
    def lanes(self) -> list[pairs.Lane]:
        """The cells that were measured in pairs, by baseline."""
        return pairs.lanes(self.results.blocks)

    @cached_property
    def curves(self) -> list[scaling.Curve]:
        return scaling.curves(self.records, self.results.price, self.results.blocks)

    @cached_property
    def points(self) -> dict[str, list[scaling.Point]]:
        price, blocks = self.results.price, self.results.blocks
        return {task: scaling.points(self.records, task, price, blocks) for task in self.tasks}

    @cached_property
    def to_target(self) -> list[target.ToTarget]:
        return target.to_target(self.records, self.results.price, self.results.blocks)

    @cached_property
    def regimes(self) -> list[regimes.Regimes]:
        return regimes.regimes(self.records)

    @cached_property
    def noise_scales(self) -> list[noise_scale.NoiseScale]:
        return noise_scale.noise_scales(self.records)

    @cached_property
    def fine_lines(self) -> list[fine_line.FineLine]:
        return fine_line.fine_lines(self.curves)

    @cached_property
    def asynchronous(self) -> list[asynchrony.Asynchrony]:
        return asynchrony.asynchronous(self.records, self.results.blocks)

    @cached_property
    def generalization(self) -> list[generalization.Generalization]:
        return generalization.generalization(self.records)

    @cached_property
    def breakdowns(self) -> list[breakdown.Breakdown]:
        return breakdown.breakdowns(self.records)

    @cached_property
    def answers(self) -> list[answer.Answer]:
        return answer.answers(self.results)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        return verdicts(self.run, None) if self.run else study_verdicts(self.results)

    @cached_property
    def rows(self) -> list[dict[str, object]]:
        return flat_rows(self.results)

    def answer_for(self, task: str) -> answer.Answer | None:
        """The answer of a task."""
        return next((each for each in self.answers if each.task == task), None)

    def winners(self, task: str) -> list[target.ToTarget | scaling.Point]:
        """The fastest cell of a task and those that are not told apart from it, as the answer has them."""
        found = self.answer_for(task)
        return found.winners if found else []

    def untried(self, task: str) -> list[target.ToTarget | scaling.Point]:
        """The cells of a task that the answer does not compare, because nobody knows what they learn."""
        found = self.answer_for(task)
        return found.untried if found else []

    def compared(self, task: str) -> list[target.ToTarget]:
        """The cells with the most common target: seconds to different targets cannot be compared."""
        mine = [each for each in self.to_target if each.task == task]
        targets = [each.target for each in mine]
        usual = max(targets, key=lambda value: (targets.count(value), value), default=None)
        return [each for each in mine if each.target == usual]

    def candidates(self, task: str) -> list[target.ToTarget | scaling.Point]:
        """All cells that the answer compares, winners first."""
        found = self.answer_for(task)
        return [cell for group in found.groups for cell in group] if found else []

    def fastest(self, cells: Sequence[scaling.Point]) -> list[scaling.Point]:
        """The cell with the highest throughput and those that are not told apart from it, fastest first."""
        ordered = candidates.by_speed(cells, "samples")
        found = candidates.tied(ordered, candidates.comparison(self.results.blocks))
        return [each.cell for each in found if isinstance(each.cell, scaling.Point)]

    def lane_leaders(self, lane: pairs.Lane) -> set[str]:
        """The fastest cells of a lane that are not told apart; the baseline takes part."""
        ratios = {
            cell: found.ratio.median
            for cell in (lane.baseline, *lane.values)
            if (found := pairs.compared(lane, cell, lane.baseline))
        }
        first = max(ratios, key=lambda cell: ratios[cell])
        others = ((cell, pairs.compared(lane, first, cell)) for cell in ratios)
        return {cell for cell, found in others if found is None or not found.apart}

    @cached_property
    def run(self) -> RunRecord | None:
        """The only run, if there is one; then there is nothing to compare."""
        return self.records[0] if len(self.records) == 1 and not self.results.command else None

    def shown_batch(self, task: str) -> int | None:
        """The batch at which strategies are compared: the one most of them were timed at."""
        kinds = {(p.variant, p.workers, p.threads, p.batch) for p in self.points.get(task, [])}
        counts = Counter(batch for *_, batch in kinds)
        return max(counts, key=lambda batch: (counts[batch], -batch)) if counts else None
