"""A claim from the literature, and what a study found about it on this machine: three verdicts, part by part.

A part is a number with an interval and a threshold:

                          threshold
        claim: below  <-------|-------  claim: above
    holds        |--x--|      |
    not settled         |--x--|--|
    does not hold             |  |--x--|      only if the experiment could have seen the effect
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from manyhands.claims.plots import Plot
from manyhands.core import formatting
from manyhands.core.statistics import Estimate
from manyhands.records.study_results import Results

Row = dict[str, object]
SEEDS = 3  # fewer do not refute anything
MOST_SEEDS = 30  # more would not be run by anybody


class Part(NamedTuple):
    """One statement of a claim: an estimate with its interval, and the threshold that decides it."""

    name: str
    found: Estimate
    threshold: float
    above: bool  # whether the claim says that the value is at or above the threshold, or at or below it
    text: str  # the finding in words
    weak: str = ""  # why the experiment could not have seen the contrary; empty if it could
    doubt: str = ""  # why neither side can be trusted
    settles: str = ""  # what would settle it, and about how long that takes
    unit: str = ""  # "x", "%" or "points"

    @property
    def holds(self) -> bool | None:
        """Whether the part holds; None if it is not settled."""
        value, low, high = self.found
        if self.doubt or math.isnan(value):
            return None
        if low >= self.threshold if self.above else high <= self.threshold:
            return True
        wrong = high <= self.threshold if self.above else low >= self.threshold
        return False if wrong and not self.weak else None

    @property
    def because(self) -> str:
        """Why the part is not settled."""
        if self.doubt or self.weak:
            return self.doubt or self.weak
        return f"its interval, {self.interval}, contains {self.shown(self.threshold)}"

    @property
    def sentence(self) -> str:
        """The finding; if it is not settled, also why, and what would settle it."""
        if self.holds is not None:
            return self.text
        return f"{self.text}: not settled, because {self.because}" + (
            f" ({self.settles})" if self.settles else ""
        )

    @property
    def interval(self) -> str:
        """`0.97x to 1.3x`."""
        low, high = self.found.low, self.found.high
        if math.isinf(low) and math.isinf(high):
            return "unknown"
        return f"{self.shown(low)} to {self.shown(high)}"

    def shown(self, value: float) -> str:
        """A value of this part with its unit."""
        if math.isinf(value):
            return "no limit" if value > 0 else "no lower limit"
        if math.isnan(value):
            return "-"
        if self.unit == "%":
            return formatting.percent(value, 1)
        if self.unit == "points":
            return f"{100 * value:.1f} points"
        text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
        return f"{text}{self.unit}"


class Finding(NamedTuple):
    """Whether a claim holds on this machine, the reasons, and the numbers behind them."""

    holds: bool | None  # None: these records do not settle it
    points: Sequence[str]
    table: Sequence[Row] = ()
    beside: str = ""  # the published numbers, for comparison
    parts: Sequence[Part] = ()
    plots: Sequence[Plot] = ()  # what was found, and what was published

    @property
    def text(self) -> str:
        """The finding as one paragraph."""
        return f"{'; '.join(self.points)}. {self.beside}".strip()

    @property
    def verdict(self) -> str:
        """`holds here`, `does not hold here`, `not settled`."""
        if self.holds is None:
            return "not settled"
        return "holds here" if self.holds else "does not hold here"


class Claim(NamedTuple):
    """A published statement, its source, and the function that tests it on records."""

    name: str
    statement: str
    source: str
    judge: Callable[[Results], Finding]
    takes: str = ""  # about how long its study runs on the development machine
    notes: Sequence[str] = ()  # how it is tested, for readers of the results
    study: str = ""  # whose runs test it, if not those of the study with its own name

    @property
    def tested_by(self) -> str:
        """The name of the study whose runs test it."""
        return self.study or self.name


class Settled(NamedTuple):
    """A claim and what was found about it."""

    claim: Claim
    finding: Finding

    @property
    def text(self) -> str:
        """The claim on one line, the verdict and its numbers on the next."""
        verdict = self.finding.verdict
        said = f"{self.claim.statement} ({self.claim.source})"
        return f"{said}\n{verdict[0].upper()}{verdict[1:]}: {self.finding.text}"


def unsettled(reason: str) -> Finding:
    """A finding that leaves the claim open, because necessary runs are missing."""
    return Finding(None, [reason])


def together(
    parts: Sequence[Part], table: Sequence[Row], beside: str = "", plots: Sequence[Plot] = ()
) -> Finding:
    """A finding from its parts: any that does not hold decides, then any that is not settled."""
    verdicts = [part.holds for part in parts]
    holds = False if False in verdicts else None if None in verdicts else True
    return Finding(holds, [part.sentence for part in parts], table, beside, parts, plots)


def settled_by(part: Part, seeds: int, seconds: float) -> Part:
    """The part with the number of seeds that would settle it, and their time, if these did not.

    An interval shrinks with the square root of the number of seeds. `seconds` is what the seeds so far took.
    """
    value, low, high = part.found
    if part.settles or part.holds is not None or not math.isfinite(value):
        return part
    if part.doubt or (part.weak and seeds >= SEEDS):  # what it lacks is not seeds
        return part
    if seeds < SEEDS or not (math.isfinite(low) and math.isfinite(high)):
        needed = SEEDS
    else:
        reach = value - low if value >= part.threshold else high - value
        distance = abs(value - part.threshold)
        many = seeds * (reach / distance) ** 2 if distance else math.inf
        needed = math.ceil(many) if many < MOST_SEEDS else 0
    if not needed:
        return part._replace(settles=f"it would take more than {MOST_SEEDS} seeds: the two sides are close")
    if needed <= seeds:
        return part
    took = formatting.duration(seconds / max(1, seeds) * needed)
    return part._replace(settles=f"about {needed} seeds would settle it, {took} of runs")
