"""What to keep, recompute and move: a dynamic program that minimizes time within a memory budget.

A model is a sequence of units. Each is kept (its saved tensors stay), moved (they are stored and loaded
again), or part of a segment that is recomputed from its inputs, which are kept or moved. While a unit works,
forward or backward, what is kept before it is in memory, but nothing of the units behind it. So

    kept so far + memory of the unit itself + what is prefetched  <=  budget          for every unit

The state of the program is what is kept so far and what is moved so far, on a grid (rounded up, so that the
budget holds), and whether the outputs of the last segment are still unsaved (`loose`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from manyhands.offload.profile import Unit

How = Literal["keep", "move", "recompute"]
LEVELS = 96  # of the grid
LONGEST = 8  # units of a recomputed segment at most


class Speed(NamedTuple):
    """The cost of moving."""

    write: float  # bytes per second
    read: float
    drag: float = 0.0  # seconds that the computation loses per byte moved there and back

    def seconds(self, moved: float, forward: float, backward: float) -> float:
        """Seconds that moving adds to a pass: what is not hidden by computation, and the drag."""
        return (
            self.drag * moved
            + max(0.0, moved / self.write - forward)
            + max(0.0, moved / self.read - backward)
        )


class Segment(NamedTuple):
    """Consecutive units that are treated the same way."""

    start: int
    stop: int
    how: How
    moves: bool  # whether its saved tensors are moved


class Plan(NamedTuple):
    """A choice and its predicted cost."""

    segments: tuple[Segment, ...]
    peak: int  # bytes of activations
    moved: int  # bytes, there and back again
    seconds: float  # more than if everything is kept
    ahead: int  # bytes that are prefetched


class _Step(NamedTuple):
    """One possible next segment."""

    segment: Segment
    kept: int
    moved: int
    work: int  # bytes while it works, besides what is kept
    seconds: float
    loose: bool  # whether its outputs are unsaved, so that the next unit may save them


def steps(units: Sequence[Unit], start: int, loose: bool, ahead: int, speed: Speed) -> Iterator[_Step]:
    """All possible next segments at a unit. `loose`: its inputs are not saved yet."""
    unit = units[start]
    for how in ("keep", "move"):
        moves = how == "move"
        held = left_by(unit, loose)
        work = ahead + unit.work + (unit.at_once if moves else unit.touched - held)
        kept, moved = (0, held) if moves else (held, 0)
        yield _Step(
            Segment(start, start + 1, "move" if moves else "keep", moves),
            kept,
            moved,
            work,
            waiting(moved, ahead, speed),
            after(unit, loose),
        )
    for stop in range(start + 1, min(start + LONGEST, len(units)) + 1):
        part = units[start:stop]
        if not part[0].alone or (stop < len(units) and not units[stop].alone):
            continue
        held = unit.inputs if loose else 0
        work = ahead + unit.inputs + _inside(part) + max(u.work for u in part)
        for moves in (False, True):
            kept, moved = (0, held) if moves else (held, 0)
            seconds = recompute_seconds(part) + waiting(moved, ahead, speed)
            segment = Segment(start, stop, "recompute", moves)
            yield _Step(segment, kept, moved, work - kept, seconds, True)


def _inside(part: Sequence[Unit]) -> int:
    """Bytes that a segment saves while it is recomputed, without its inputs."""
    total, loose = 0, False
    for unit in part:
        total += left_by(unit, loose)
        loose = after(unit, loose)
    return total


def after(unit: Unit, loose: bool) -> bool:
    """Whether the outputs of a unit that is kept or moved are unsaved."""
    return not unit.saves_outputs and (loose or not unit.same)


def left_by(unit: Unit, loose: bool) -> int:
    """Bytes that this unit is the first to save."""
    inputs = unit.inputs if unit.saves_inputs and loose and not (unit.same and unit.saves_outputs) else 0
    return unit.own + inputs + (unit.outputs if unit.saves_outputs else 0)


def recompute_seconds(part: Sequence[Unit]) -> float:
    """Seconds to recompute a segment, up to its last saved tensor. The last unit may only save its inputs."""
    last = part[-1]
    only_inputs = last.own == 0 and not last.saves_outputs
    return sum(unit.forward for unit in part) - (last.forward if only_inputs else 0.0)


def waiting(moved: int, ahead: int, speed: Speed) -> float:
    """Seconds that backward waits for a tensor that is too large to prefetch."""
    return moved / speed.read if moved > ahead else 0.0


def least(units: Sequence[Unit]) -> int:
    """The smallest budget that has a plan: everything moved, nothing prefetched."""
    return max(unit.at_once + unit.work for unit in units)


def plain(units: Sequence[Unit]) -> int:
    """The peak if everything is kept."""
    peak = held = 0
    loose = True
    for unit in units:
        mine = left_by(unit, loose)
        held += mine
        peak = max(peak, held + unit.touched - mine + unit.work)
        loose = after(unit, loose)
    return peak


def choose(
    units: Sequence[Unit], budget: int, speed: Speed, aheads: Sequence[int] = (0,), levels: int = LEVELS
) -> Plan | None:
    """The fastest plan within the budget, or None."""
    forward, backward = sum(u.forward for u in units), sum(u.backward for u in units)
    plans = [
        plan for ahead in aheads if (plan := _choose(units, budget, speed, ahead, levels, forward, backward))
    ]
    return min(plans, key=lambda plan: (plan.seconds, plan.peak), default=None)


def _choose(
    units: Sequence[Unit],
    budget: int,
    speed: Speed,
    ahead: int,
    levels: int,
    forward: float,
    backward: float,
) -> Plan | None:
    total = sum(left_by(unit, True) + unit.inputs for unit in units)
    kept_unit, moved_unit = max(1, -(-budget // levels)), max(1, -(-total // levels))
    most = levels + len(units)  # each unit may be rounded up by one
    shape = (levels + 1, most + 1)
    # the fewest seconds of recomputing and waiting: [unit][loose][kept][moved]
    best = np.full((len(units) + 1, 2, *shape), np.inf)
    came = np.full((len(units) + 1, 2, *shape), -1, dtype=np.int32)
    best[0, 1, 0, 0] = 0.0
    ways: list[
        tuple[_Step, int, int, int]
    ] = []  # a step, its kept and moved in the grid, and loose before it
    for start in range(len(units)):
        for loose in (0, 1):
            here = best[start, loose]
            if not np.isfinite(here).any():
                continue
            for step in steps(units, start, bool(loose), ahead, speed):
                kept, moved = -(-step.kept // kept_unit), -(-step.moved // moved_unit)
                highest = (budget - step.work) // kept_unit - kept  # of what is kept before
                if step.work > budget or highest < 0:
                    continue
                rows = min(highest, levels - kept) + 1
                columns = most + 1 - moved
                if rows < 1 or columns < 1:
                    continue
                ways.append((step, kept, moved, loose))
                there = best[step.segment.stop, int(step.loose)]
                area = there[kept : kept + rows, moved : moved + columns]
                cost = here[:rows, :columns] + step.seconds
                better = cost < area
                area[better] = cost[better]
                origin = came[step.segment.stop, int(step.loose)][kept : kept + rows, moved : moved + columns]
                origin[better] = len(ways) - 1
    moving = np.array([speed.seconds(number * moved_unit, forward, backward) for number in range(most + 1)])
    ends = best[-1] + moving
    if not np.isfinite(ends).any():
        return None
    loose, kept, moved = (int(index) for index in np.unravel_index(np.argmin(ends), ends.shape))
    chosen: list[_Step] = []
    stop = len(units)
    while stop:
        step, rose, went, before = ways[came[stop, loose, kept, moved]]
        chosen.append(step)
        stop, loose, kept, moved = step.segment.start, before, kept - rose, moved - went
    return cost_of(units, chosen[::-1], speed, ahead)


def cost_of(units: Sequence[Unit], chosen: Sequence[_Step], speed: Speed, ahead: int) -> Plan:
    """The plan of these steps, with its exact cost."""
    peak = held = 0
    for step in chosen:
        held += step.kept
        peak = max(peak, held + step.work)
    moved = sum(step.moved for step in chosen)
    forward, backward = sum(u.forward for u in units), sum(u.backward for u in units)
    seconds = sum(step.seconds for step in chosen) + speed.seconds(moved, forward, backward)
    return Plan(tuple(step.segment for step in chosen), peak, moved, seconds, ahead)
