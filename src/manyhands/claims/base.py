"""A claim of the literature, and what a study of it found here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from manyhands.records.study_results import Results

Row = dict[str, object]


class Finding(NamedTuple):
    """Whether a claim holds on this machine, what says so, and the numbers behind it."""

    holds: bool | None  # none: these records do not settle it
    points: Sequence[str]
    table: Sequence[Row] = ()
    beside: str = ""  # what was found elsewhere, to compare with

    @property
    def text(self) -> str:
        """All of it in a paragraph."""
        return f"{'; '.join(self.points)}. {self.beside}".strip()

    @property
    def verdict(self) -> str:
        """`holds here`, `does not hold here`, `not settled here`."""
        if self.holds is None:
            return "not settled here"
        return "holds here" if self.holds else "does not hold here"


class Claim(NamedTuple):
    """What somebody found elsewhere, who, and how records settle it."""

    name: str
    statement: str
    source: str
    judge: Callable[[Results], Finding]


class Settled(NamedTuple):
    """A claim beside what was found."""

    claim: Claim
    finding: Finding

    @property
    def text(self) -> str:
        """The claim in one line, the verdict and its numbers in another."""
        verdict = self.finding.verdict
        said = f"{self.claim.statement} ({self.claim.source})"
        return f"{said}\n{verdict[0].upper()}{verdict[1:]}: {self.finding.text}"


def unsettled(reason: str) -> Finding:
    """Too little was run."""
    return Finding(None, [reason])


def together(parts: list[tuple[bool, str]], table: list[Row], beside: str = "") -> Finding:
    """A claim that holds where all of its parts do."""
    return Finding(all(holds for holds, _ in parts), [text for _, text in parts], table, beside)
