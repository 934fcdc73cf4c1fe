"""The phases into which a worker's time is divided."""

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
    "paused",
)


PAUSED = "paused"  # asleep while another run is measured: no part of the run
ASIDE = ("evaluation", "checkpoint", PAUSED)  # wall-clock time that is not training


class Span(NamedTuple):
    """An interval in one phase; begin and end in seconds."""

    phase: str
    begin: float
    end: float


def training_phases(phases: Mapping[str, float]) -> dict[str, float]:
    """The phases without evaluation, checkpoints and pauses."""
    return {name: seconds for name, seconds in phases.items() if name not in ASIDE}
