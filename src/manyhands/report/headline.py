"""What the page, the notebook and the command line say first: the answer of a study, or what one run did."""

from __future__ import annotations

from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.crossing import crossing
from manyhands.core import formatting
from manyhands.records.record import RunRecord
from manyhands.report.charts import common
from manyhands.report.findings import Findings

LEADING = 2  # sentences in large letters


class Headline(NamedTuple):
    """The sentences about one task, the most important ones first."""

    task: str
    leading: list[str]
    details: list[str]

    @property
    def text(self) -> str:
        """All sentences."""
        return " ".join([*self.leading, *self.details])


def headlines(findings: Findings) -> list[Headline]:
    """One headline per task, or that of the only run."""
    if findings.run is not None:
        lines = [_learned(findings.run), *_speed(findings.run)]
        return [Headline(groups.task_name(findings.run), lines[:LEADING], lines[LEADING:])]
    return [
        Headline(each.task, each.lines[:LEADING], each.lines[LEADING:])
        if each.lines
        else Headline(each.task, [each.text], [])
        for each in findings.answers
    ]


def _learned(run: RunRecord) -> str:
    """Whether and when the run reached its target."""
    target = formatting.threshold(run.target, run.metric_name)
    name = f"{groups.task_name(run)} with {groups.title(run)}"
    ended = f"{run.metric_name} {formatting.score(run.metric, run.metric_name)} at the end"
    if run.status == "diverged":
        return f"{name} diverged after {formatting.count(run.samples, run.unit)}."
    found = crossing(run)
    if found is None:
        best = formatting.score(run.best_metric, run.metric_name)
        tried = (
            f"did not reach {target} (best: {best})" if run.best_metric is not None else "was not evaluated"
        )
        return f"{name} {tried} in {formatting.count(run.samples, run.unit)}."
    took = f", {common.brief_time(found.seconds)} of training" if found.seconds else ""
    seen = formatting.count(round(found.samples), run.unit)
    return f"{name} reached {target} after {seen}{took}; {ended}."


def _speed(run: RunRecord) -> list[str]:
    """How fast the run was, and what it spent its time on."""
    if run.throughput <= 0:
        return []
    went = formatting.where_the_time_went(run.worker_phases)
    return [
        f"It processed {formatting.rate(run.throughput, run.unit)} in one measurement, without a comparison.",
        *([f"Where the time went: {went}."] if went else []),
        f"It took {formatting.duration(run.seconds)} in all, evaluation and checkpoints included.",
    ]
