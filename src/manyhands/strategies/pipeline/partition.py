"""The partition of a model into stages, such that the slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from manyhands.core import formatting
from manyhands.core.errors import UsageError
from manyhands.offload.blocks import Cost


class Stage(NamedTuple):
    """One part of a partitioned model, measured with one micro-batch."""

    first: int  # block
    end: int
    seconds: float  # forward and backward
    saved: int  # bytes kept for backward
    outputs: int  # bytes sent to the next stage
    parameters: int


def balanced(
    seconds: Sequence[float], stages: int, *, transfer: Sequence[float] = (), forbidden: Collection[int] = ()
) -> tuple[int, ...]:
    """The blocks at which the later stages begin, such that the slowest stage takes the least time.

    `transfer` is the time that sending the outputs of a block costs each neighbor. No stage begins at a
    `forbidden` block. An exact dynamic program: the best partition of the first j blocks into s stages
    follows from the best partitions of fewer blocks into s - 1. Of equally good ones, the more even wins.
    """
    count = len(seconds)
    transfer = transfer or [0.0] * count
    sums = [0.0]
    for each in seconds:
        sums.append(sums[-1] + each)

    def cost(first: int, end: int) -> float:
        before = transfer[first - 1] if first else 0.0
        return before + sums[end] - sums[first] + (transfer[end - 1] if end < count else 0.0)

    # the slowest stage, and the sum of squares, which breaks ties by how even the rest is
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {
        end: (cost(0, end), cost(0, end) ** 2, ()) for end in range(1, count + 1)
    }
    for _ in range(stages - 1):
        further: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(1, count + 1):
            for border in range(1, end):
                if border in forbidden or border not in best:
                    continue
                slowest, squares, borders = best[border]
                own = cost(border, end)
                found = (max(slowest, own), squares + own**2, (*borders, border))
                if end not in further or found < further[end]:
                    further[end] = found
        best = further
    if count not in best:
        excluded = [str(border) for border in sorted(forbidden) if 0 < border < count]
        block = "blocks" if len(excluded) > 1 else "block"
        listed = ", ".join(excluded)
        why = f": none can begin at {block} {listed} (shared parameters, or inputs changed in place)"
        sentence = f"{formatting.plural(count, 'block')} cannot be cut into {stages} stages"
        raise UsageError(sentence + (why if excluded else ""))
    return best[count][2]


def stages_of(costs: Sequence[Cost], borders: Sequence[int]) -> list[Stage]:
    """The stages that begin at these blocks, each with the total cost of its blocks."""
    found = []
    for first, end in pairwise((0, *borders, len(costs))):
        part = costs[first:end]
        found.append(
            Stage(
                first,
                end,
                sum(cost.seconds for cost in part),
                sum(cost.saved for cost in part),
                part[-1].outputs,
                sum(cost.parameters for cost in part),
            )
        )
    return found


def describe(stages: Sequence[Stage]) -> str:
    """`cut: blocks 0-4 (51 % of the time, 320,000 parameters, sends 1.2 MB) | 5-10 (49 %, ...)`."""
    total = sum(stage.seconds for stage in stages) or 1.0
    parts = []
    for number, stage in enumerate(stages):
        blocks = f"{stage.first}-{stage.end - 1}" if stage.end - stage.first > 1 else f"{stage.first}"
        sends = f", sends {formatting.size(stage.outputs)}" if number < len(stages) - 1 else ""
        share = formatting.percent(stage.seconds / total) + (" of the time" if number == 0 else "")
        parts.append(f"{blocks} ({share}, {formatting.plural(stage.parameters, 'parameter')}{sends})")
    return "cut: blocks " + " | ".join(parts)


def to_record(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """The stages as a run's record keeps them."""
    return [stage._asdict() for stage in stages]
