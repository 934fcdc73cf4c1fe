"""Where a model is cut into stages, so that the slowest stage is as fast as can be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from manyhands.core import formatting
from manyhands.core.errors import UsageError
from manyhands.offload.blocks import Cost


class Stage(NamedTuple):
    """One part of a cut model, measured with one micro-batch."""

    first: int  # block
    end: int
    seconds: float  # forward and backward
    saved: int  # bytes kept for backward
    outputs: int  # bytes handed on
    parameters: int


def balanced(
    seconds: Sequence[float], stages: int, *, handing: Sequence[float] = (), closed: Collection[int] = ()
) -> tuple[int, ...]:
    """The blocks at which the later stages begin, such that the slowest stage takes the least time.

    `handing` is what it costs both neighbors to hand on the outputs of a block; `closed` borders are not
    cut. An exact dynamic program: the best cut of the first j blocks into s stages follows from the best
    cuts of fewer blocks into s - 1. Of equally good ones, the more even is preferred.
    """
    count = len(seconds)
    handing = handing or [0.0] * count
    sums = [0.0]
    for each in seconds:
        sums.append(sums[-1] + each)

    def cost(first: int, end: int) -> float:
        before = handing[first - 1] if first else 0.0
        return before + sums[end] - sums[first] + (handing[end - 1] if end < count else 0.0)

    # the slowest stage and the sum of squares, so that ties are broken by how even the rest is
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {
        end: (cost(0, end), cost(0, end) ** 2, ()) for end in range(1, count + 1)
    }
    for _ in range(stages - 1):
        further: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(1, count + 1):
            for border in range(1, end):
                if border in closed or border not in best:
                    continue
                slowest, squares, cuts = best[border]
                own = cost(border, end)
                found = (max(slowest, own), squares + own**2, (*cuts, border))
                if end not in further or found < further[end]:
                    further[end] = found
        best = further
    if count not in best:
        borders = [str(border) for border in sorted(closed) if 0 < border < count]
        block = "blocks" if len(borders) > 1 else "block"
        why = f": none begins at {block} {', '.join(borders)} (shared parameters, or inputs changed in place)"
        sentence = f"{formatting.plural(count, 'block')} cannot be cut into {stages} stages"
        raise UsageError(sentence + (why if borders else ""))
    return best[count][2]


def stages_of(costs: Sequence[Cost], cuts: Sequence[int]) -> list[Stage]:
    """What each stage takes together."""
    found = []
    for first, end in pairwise((0, *cuts, len(costs))):
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


def described(stages: Sequence[Stage]) -> str:
    """`cut: blocks 0-4 (51 % of the time, 320,000 parameters, hands on 1.2 MB) | 5-10 (49 %, ...)`."""
    total = sum(stage.seconds for stage in stages) or 1.0
    parts = []
    for number, stage in enumerate(stages):
        blocks = f"{stage.first}-{stage.end - 1}" if stage.end - stage.first > 1 else f"{stage.first}"
        hands = f", hands on {formatting.size(stage.outputs)}" if number < len(stages) - 1 else ""
        share = formatting.percent(stage.seconds / total) + (" of the time" if number == 0 else "")
        parts.append(f"{blocks} ({share}, {formatting.plural(stage.parameters, 'parameter')}{hands})")
    return "cut: blocks " + " | ".join(parts)


def recorded(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """For the record."""
    return [stage._asdict() for stage in stages]
