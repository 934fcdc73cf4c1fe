"""What a run lost and how to get it back, in sentences: rules over its mean step, the largest loss first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from manyhands.analysis.scaling import Baseline
from manyhands.record import RunRecord
from manyhands.results import Results


class Verdict(NamedTuple):
    """One finding."""

    rule: str
    text: str
    lost: float  # the share of the step that would be gained; 0 for remarks


Rule = Callable[[RunRecord, Baseline | None, Baseline | None], Verdict | None]
RULES: list[tuple[str, Rule]] = []


def verdicts(
    record: RunRecord, baseline: Baseline | None, threads_baseline: Baseline | None = None
) -> list[Verdict]:
    """All that apply, the largest loss first."""
    found = [rule(record, baseline, threads_baseline) for _, rule in RULES]
    return sorted(filter(None, found), key=lambda verdict: -verdict.lost)


def word(verdicts: Sequence[Verdict]) -> str:
    """A few words for a table."""
    return verdicts[0].rule if verdicts else ""


def study_verdicts(results: Results) -> list[Verdict]:
    """Of a study as a whole."""
    return []
