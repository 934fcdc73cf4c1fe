"""When a run reached its target: interpolated between two evaluations, with their distance as uncertainty.

    metric   target ------------------x-----      x: the crossing
                                 .--*             *: evaluations
                          *-----'
             samples      before     after

A run is evaluated only now and then, so the evaluation that finds the target reached is always late, by up to
a whole interval. A straight line between the evaluations before and after is right on average.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.records.record import Evaluation, RunRecord


class Crossing(NamedTuple):
    """Where a run reached its target, and the evaluations between which it did."""

    samples: float
    steps: float
    seconds: float | None  # of training; None in records that do not say
    before: int  # samples at the last evaluation below the target; 0 if there is none
    after: int  # samples at the first evaluation that reached it

    @property
    def spread(self) -> float:
        """The standard deviation of log samples: somewhere between the two evaluations.

        As of a uniform distribution. With nothing before the first evaluation, half of it is taken for the
        lower end.
        """
        lower = max(self.before, self.after / 2)
        return math.log(self.after / lower) / math.sqrt(12) if lower < self.after else 0.0


def crossing(record: RunRecord) -> Crossing | None:
    """Where a run crossed its target; None if it did not.

    Old records have no curve, and their evaluation is taken as it is.
    """
    at = record.target_samples
    if at is None:
        return None
    steps = at / groups.batch(record) if record.target_steps is None else float(record.target_steps)
    after = next((point for point in record.curve if point.samples == at), None)
    before = [point for point in record.curve if point.samples < at][-1:]
    if after is None or after.metric is None or not before or before[0].metric is None:
        since = before[0].samples if before else 0 if record.curve else at
        return Crossing(float(at), steps, record.target_seconds, since, at)
    return _between(before[0], after, record.target)


def retargeted(record: RunRecord, target: float) -> RunRecord:
    """The record as it would be if this had been its target; its curve says when it was reached."""
    sign = 1 if groups.higher_is_better(record) else -1
    reached = [
        point for point in record.curve if point.metric is not None and sign * (point.metric - target) >= 0
    ]
    first = reached[0] if reached else None
    return record.model_copy(
        update={
            "target": target,
            "target_samples": first.samples if first else None,
            "target_steps": first.step if first else None,
            "target_seconds": first.seconds if first else None,
            # a run that ended at its own target trained to its end, as far as this one is concerned
            "status": "finished" if record.status == "target" else record.status,
        }
    )


def _between(before: Evaluation, after: Evaluation, target: float) -> Crossing:
    assert before.metric is not None
    assert after.metric is not None
    gained = after.metric - before.metric
    share = min(1.0, max(0.0, (target - before.metric) / gained)) if gained else 1.0

    def at(first: float, last: float) -> float:
        return first + share * (last - first)

    return Crossing(
        at(before.samples, after.samples),
        at(before.step, after.step),
        at(before.seconds, after.seconds),
        before.samples,
        after.samples,
    )
