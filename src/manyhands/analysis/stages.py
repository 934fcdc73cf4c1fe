"""How evenly a model is cut into stages, and how long stages wait for each other because of it."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.analysis import groups
from manyhands.analysis.breakdown import compute, rank_phases
from manyhands.core import formatting
from manyhands.records.record import RunRecord


def shares(record: RunRecord) -> list[float] | None:
    """The share of each stage in the time of a batch; None if nobody measured it.

    As measured when the model was cut. Old records do not have that: the compute time of each rank stands for
    it, unless ranks took turns on the same cores.
    """
    stages = record.spec.stages
    seconds = [float(each.get("seconds", 0.0)) for each in record.choices.get("stages", ())]
    if len(seconds) != stages and not groups.crowded(record):
        ranks = rank_phases(record)
        seconds = [compute(ranks[stage]) for stage in range(stages) if stage in ranks]
    total = sum(seconds)
    if len(seconds) != stages or total <= 0 or min(seconds) < 0:
        return None
    return [each / total for each in seconds]


def idle(shares: Sequence[float], micro_batches: int | None = None) -> float:
    """The share of its time that a stage is idle, on average; without a number, with any number of parts.

    The first micro-batch passes through all stages, and each further one follows after the time of the
    slowest stage. With equal stages it is the published (stages - 1) / (micro-batches + stages - 1).

        stage 0  1 2 3 . . . . .    three micro-batches, one stage twice as slow as the others:
        stage 1  . 1 2 3 . . . .    12 of 3 x 8 moments are idle
        stage 2  . . 1 1 2 2 3 3
    """
    whole, slowest = sum(shares), max(shares)
    if micro_batches is None:
        return 1 - whole / (len(shares) * slowest)
    return 1 - micro_batches * whole / (len(shares) * (whole + (micro_batches - 1) * slowest))


def text(shares: Sequence[float]) -> str:
    """`8 | 66 | 17 | 9 %`."""
    return " | ".join(f"{100 * each:.0f}" for each in shares) + " %"


def uneven(shares: Sequence[float]) -> str:
    """`one stage has 66 % of the work (measured: 8 | 66 | 17 | 9 %)`."""
    return f"one stage has {formatting.percent(max(shares))} of the work (measured: {text(shares)})"
