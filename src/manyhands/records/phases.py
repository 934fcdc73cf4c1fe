"""The phases that a worker's time is divided into, and a stretch of time in one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

PHASES = (
    "data",
    "forward",
    "backward",
    "communication",
    "wait",
    "optimizer",
    "evaluation",
    "checkpoint",
    "other",
)


ASIDE = ("evaluation", "checkpoint")  # real time, but not training


class Span(NamedTuple):
    """A stretch of time in one phase, in seconds."""

    phase: str
    begin: float
    end: float


def training_phases(phases: Mapping[str, float]) -> dict[str, float]:
    """The phases that are training."""
    return {name: seconds for name, seconds in phases.items() if name not in ASIDE}
