"""The analyses of one study, each computed once for all charts, tables and sentences."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

from manyhands.analysis import (
    answer,
    asynchrony,
    breakdown,
    fine_line,
    generalization,
    groups,
    noise_scale,
    regimes,
    scaling,
    target,
)
from manyhands.analysis.rows import rows as flat_rows
from manyhands.analysis.verdicts import Verdict, study_verdicts
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
        return study_verdicts(self.results)

    @cached_property
    def rows(self) -> list[dict[str, object]]:
        return flat_rows(self.results)

    def shown_batch(self, task: str) -> int | None:
        """The batch at which strategies are compared: the one most of them were timed at."""
        kinds = {(p.variant, p.workers, p.threads, p.batch) for p in self.points.get(task, [])}
        counts = Counter(batch for *_, batch in kinds)
        return max(counts, key=lambda batch: (counts[batch], -batch)) if counts else None
