"""A claim from the literature, and what a study found about it on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from manyhands.records.study_results import Results

Row = dict[str, object]


class Finding(NamedTuple):
    """Whether a claim holds on this machine, the reasons, and the numbers behind them."""

    holds: bool | None  # None: these records do not settle it
    points: Sequence[str]
    table: Sequence[Row] = ()
    beside: str = ""  # the published numbers, for comparison

    @property
    def text(self) -> str:
        """The finding as one paragraph."""
        return f"{'; '.join(self.points)}. {self.beside}".strip()

    @property
    def verdict(self) -> str:
        """`holds here`, `does not hold here`, `not settled here`."""
        if self.holds is None:
            return "not settled here"
        return "holds here" if self.holds else "does not hold here"


class Claim(NamedTuple):
    """A published statement, its source, and the function that tests it on records."""

    name: str
    statement: str
    source: str
    judge: Callable[[Results], Finding]


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


def together(parts: list[tuple[bool, str]], table: list[Row], beside: str = "") -> Finding:
    """A finding that holds if all of its parts hold."""
    return Finding(all(holds for holds, _ in parts), [text for _, text in parts], table, beside)
