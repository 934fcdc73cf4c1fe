"""What to keep, recompute and move so that a memory budget holds at the least time: a dynamic program.

A model is a row of units. Each is kept (its saved tensors stay), moved (they leave and come back), or part of
a segment that is recomputed from its inputs, which are kept or moved. What is kept before a unit is there
while the unit works, forward and backward; what comes behind it is not yet, or no more. So

    kept so far + what the unit works with + what is fetched ahead  <=  budget          for every unit

and the state of the program is what is kept so far and what is moved so far, in steps of a grid (rounded
up, so that the budget holds), and whether the last segment left its outputs to nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from manyhands.offload.profile import Unit

How = Literal["keep", "move", "recompute"]
LEVELS = 96  # steps of the grid
LONGEST = 8  # units of a segment that is recomputed


class Speed(NamedTuple):
    """What moving costs."""

    write: float  # bytes a second
    read: float
    drag: float = 0.0  # seconds that computing loses a byte moved, there and back

    def seconds(self, moved: float, forward: float, backward: float) -> float:
        """What moving so much adds to a pass: what does not fit behind computing, and the drag."""
        return (
            self.drag * moved
            + max(0.0, moved / self.write - forward)
            + max(0.0, moved / self.read - backward)
        )


class Segment(NamedTuple):
    """Consecutive units that are treated alike."""

    start: int
    stop: int
    how: How
    moves: bool  # what it leaves for backward is moved


class Plan(NamedTuple):
    """A choice and what it should cost."""

    segments: tuple[Segment, ...]
    peak: int  # bytes of activations
    moved: int  # bytes there, and as many back
    seconds: float  # more than keeping everything
    ahead: int  # bytes that are fetched before they are needed


class _Step(NamedTuple):
    """One way to go on from a unit."""

    segment: Segment
    kept: int
    moved: int
    work: int  # bytes while it works, beside what is kept
    seconds: float
    loose: bool  # whether its outputs are left to whoever saves them next


def steps(units: Sequence[Unit], start: int, loose: bool, ahead: int, speed: Speed) -> Iterator[_Step]:
    """Every way to go on from a unit; `loose` where nobody before it holds its inputs."""
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
            seconds = again(part) + waiting(moved, ahead, speed)
            segment = Segment(start, stop, "recompute", moves)
            yield _Step(segment, kept, moved, work - kept, seconds, True)


def _inside(part: Sequence[Unit]) -> int:
    """Bytes that a segment saves while it is recomputed, its inputs left out."""
    total, loose = 0, False
    for unit in part:
        total += left_by(unit, loose)
        loose = after(unit, loose)
    return total


def after(unit: Unit, loose: bool) -> bool:
    """Whether a unit that is kept or moved leaves its outputs to whoever saves them next."""
    return not unit.saves_outputs and (loose or not unit.same)


def left_by(unit: Unit, loose: bool) -> int:
    """Bytes that are saved by this unit first."""
    inputs = unit.inputs if unit.saves_inputs and loose and not (unit.same and unit.saves_outputs) else 0
    return unit.own + inputs + (unit.outputs if unit.saves_outputs else 0)


def again(part: Sequence[Unit]) -> float:
    """Seconds to recompute: it ends with the last tensor saved, and a last unit may save its inputs alone."""
    last = part[-1]
    only_inputs = last.own == 0 and not last.saves_outputs
    return sum(unit.forward for unit in part) - (last.forward if only_inputs else 0.0)


def waiting(moved: int, ahead: int, speed: Speed) -> float:
    """Seconds that backward waits for what is too large to be fetched ahead."""
    return moved / speed.read if moved > ahead else 0.0


def least(units: Sequence[Unit]) -> int:
    """The smallest budget there is a plan for: everything moved, nothing fetched ahead."""
    return max(unit.at_once + unit.work for unit in units)


def plain(units: Sequence[Unit]) -> int:
    """What keeping everything takes at its peak."""
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
    """The plan within the budget that takes the least time; None where there is none."""
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
    grain, heap = max(1, -(-budget // levels)), max(1, -(-total // levels))
    most = levels + len(units)  # each may be rounded up by one
    shape = (levels + 1, most + 1)
    # the least seconds of recomputing and waiting: [unit][loose][kept][moved]
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
                kept, moved = -(-step.kept // grain), -(-step.moved // heap)
                highest = (budget - step.work) // grain - kept  # of what is kept before
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
    moving = np.array([speed.seconds(number * heap, forward, backward) for number in range(most + 1)])
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
    """A row of steps with its exact figures."""
    peak = held = 0
    for step in chosen:
        held += step.kept
        peak = max(peak, held + step.work)
    moved = sum(step.moved for step in chosen)
    forward, backward = sum(u.forward for u in units), sum(u.backward for u in units)
    seconds = sum(step.seconds for step in chosen) + speed.seconds(moved, forward, backward)
    return Plan(tuple(step.segment for step in chosen), peak, moved, seconds, ahead)
