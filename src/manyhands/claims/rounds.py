"""Speeds of two cells in pairs: from blocks next to each other, or from repeats of a study."""

from __future__ import annotations

import math

from manyhands.analysis import groups, pairs
from manyhands.analysis.pairs import Compared
from manyhands.core.statistics import USUAL_FREEDOM, USUAL_NOISE, around, moderated
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results


def compare(results: Results, one: RunRecord, other: RunRecord) -> Compared | None:
    """How many times as fast `one` is as `other`; None if they were not measured together.

    Cells that are not measured in blocks run once per repeat of the study, one after the other.
    """
    if (found := pairs.compare(results, one, other)) is not None:
        return found
    over, under = (_by_repeat(results, record) for record in (one, other))
    logs = [math.log(over[at] / under[at]) for at in sorted(over.keys() & under.keys())]
    if not logs:
        return None
    center, rounds = math.fsum(logs) / len(logs), len(logs)
    usual = 2 * USUAL_NOISE**2  # the noise of both
    reach = moderated(logs, usual, USUAL_FREEDOM)
    squares = math.fsum((each - center) ** 2 for each in logs)
    spread = math.sqrt(squares / (rounds - 1) if rounds > 1 else usual)
    return Compared(around(center, reach, rounds), rounds, spread, abs(center) > reach)


def _by_repeat(results: Results, record: RunRecord) -> dict[tuple[int, int], float]:
    """The speed of a cell in each round of the study, by repeat and seed."""
    return {
        (each.repeat, each.spec.seed): each.throughput
        for each in results.records
        if groups.measured(each)
        and groups.task_name(each) == groups.task_name(record)
        and groups.key(each) == groups.key(record)
    }
