"""Speeds compared in pairs: a block of a cell next to blocks of the baseline, so that drift cancels.

    round 0:  B  c1  B  c2  B  c3  B          B: the baseline, one worker with one thread
    round 1:  B  c2  B  c3  B  c1  B          value of c2 = log c2 - median of log B, of the nearest four

A machine that is 15 % slower in one minute than in the next one is slower for neighbors alike. Cells are
compared by the differences of their values in the rounds that they share.

Rounds are added until the leaders are told apart or the budget is spent. Who looks again and again at growing
data finds a difference sooner or later where there is none. So there are a few looks, after numbers of rounds
that are fixed in advance, and the error of 5 % per comparison is divided among them; what is left is for the
end. `benchmarks/trust/pairs.py` simulates how often equal cells are told apart, and different ones are not.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from manyhands.core.statistics import (
    CONFIDENCE,
    USUAL_FREEDOM,
    USUAL_NOISE,
    Summary,
    around,
    moderated,
)
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Block, Results

LOOKS = (3, 5, 8, 12, 17, 23)  # rounds after which cells may be eliminated
SPENT = (0.004, 0.006, 0.007, 0.007, 0.007, 0.007)  # the error of each look; 0.012 is left for the end
ERROR = 1 - CONFIDENCE
NEAR = 4  # baseline blocks per value, if there are: one that something else slowed down does not spoil it
# The variance of one value, as far as is known before anything is measured: blocks vary by 3 to 4 %.
USUAL_PAIR = 0.044**2
ALIKE = 6  # degrees of freedom that the noise of all cells together is worth to the noise of one of them
CLIP = 2.0  # standard deviations, beyond which a value counts as if it were there

Round = tuple[int, int]  # session, number of the round in it
Values = Mapping[Round, float]


class Compared(NamedTuple):
    """How many times as fast one cell is as another one.

    The two are told apart exactly if the interval of the ratio excludes 1.
    """

    ratio: Summary
    rounds: int  # that both have
    spread: float  # relative standard deviation of the ratio from round to round
    apart: bool


class Decision(NamedTuple):
    """What to measure in the next rounds."""

    eliminated: set[str]  # slower than the leader, or not measured any more
    leaders: set[str]  # not told apart from the fastest
    settled: bool  # further rounds would tell nothing more


class Advantage(NamedTuple):
    """How many times fewer samples a cell needs than one worker: the interval of its logarithm."""

    low: float
    high: float


LEVEL = Advantage(0.0, 0.0)  # the same samples


class Lane(NamedTuple):
    """The paired values of all cells that have the same baseline."""

    baseline: str
    values: Mapping[str, Values]  # logarithms of their speeds over the baseline's

    @property
    def rounds(self) -> int:
        """The number of rounds of the cell that has the most."""
        return max(map(len, self.values.values()), default=0)

    def difference(self, one: str, other: str) -> list[float]:
        """The logarithms of one's speed over the other's, by round."""
        mine, theirs = (self.values.get(cell, {}) for cell in (one, other))
        if other == self.baseline:
            return list(mine.values())
        if one == self.baseline:
            return [-each for each in theirs.values()]
        return [mine[at] - theirs[at] for at in mine if at in theirs]

    def usual(self, one: str, other: str) -> float:
        """The variance that the other cells let expect of such a difference; without others, all values."""
        mine = frozenset({one, other}) - {self.baseline}
        if len(self.values) > 2:
            return self._variance(one, other, mine)
        return len(mine) * self._variance(one, self.baseline, frozenset())

    @property
    def alike(self) -> int:
        """How many degrees of freedom `usual` is worth; two cells alone are all that it is known from."""
        return ALIKE if len(self.values) > 2 else ALIKE // 3

    def typical(self, one: str, other: str) -> float:
        """The variance of such differences, over all cells."""
        return self._variance(one, other, frozenset())

    def _variance(self, one: str, other: str, without: frozenset[str]) -> float:
        if self.baseline in (one, other):
            prior, ways = USUAL_PAIR, [(cell, self.baseline) for cell in self.values]
        else:
            prior, ways = 2 * USUAL_PAIR, list(itertools.combinations(self.values, 2))
        lists = [
            self.difference(*way) for way in ways if not without or not without >= {*way} - {self.baseline}
        ]
        changes = [abs(later - each) for found in lists for each, later in itertools.pairwise(found)]
        if not changes:
            return prior
        # the median change of a normal variable from one value to the next is 0.954 standard deviations, and
        # a median is worth about half of the degrees of freedom of its values
        seen = (statistics.median(changes) / 0.954) ** 2
        known = sum(len(found) - 1 for cell, found in self.values.items() if cell not in without) / 2
        return (USUAL_FREEDOM * prior + known * seen) / (USUAL_FREEDOM + known)


def lanes(blocks: Sequence[Block]) -> list[Lane]:
    """The values of all paired cells. A block without a baseline block on both sides has none."""
    found: dict[str, dict[str, dict[Round, float]]] = {}
    for earlier, row in itertools.pairwise([[], *_rows(blocks)]):
        base = [block for block in row if block.position % 2 == 0]
        lead_in = [block for block in earlier[-1:] if base and _next_round(block, base[0])]
        for block in row:
            before = lead_in + [each for each in base if each.position < block.position]
            after = [each for each in base if each.position > block.position]
            sides = min(NEAR // 2, len(before), len(after))  # as many on both: then a steady drift cancels
            if block.position % 2 and sides:
                near = before[-sides:] + after[:sides]
                level = statistics.median(math.log(each.samples_per_second) for each in near)
                values = found.setdefault(base[0].cell, {}).setdefault(block.cell, {})
                values[block.session, block.round] = math.log(block.samples_per_second) - level
    return [Lane(baseline, values) for baseline, values in found.items()]


def lane_of(blocks: Sequence[Block], *cells: str) -> Lane | None:
    """The lane that all of these cells are in."""
    for lane in lanes(blocks):
        if all(cell == lane.baseline or cell in lane.values for cell in cells):
            return lane
    return None


def compare(results: Results, one: RunRecord, other: RunRecord) -> Compared | None:
    """How many times as fast `one` is as `other`; None if they have no common rounds."""
    return compare_cells(results.blocks, one.cell, other.cell) if one.cell and other.cell else None


def compare_cells(blocks: Sequence[Block], one: str, other: str) -> Compared | None:
    """The same for the keys of two cells."""
    lane = lane_of(blocks, one, other)
    return compared(lane, one, other) if lane else None


def compared(lane: Lane, one: str, other: str) -> Compared | None:
    """The same for two cells of a lane."""
    if one == other:
        return Compared(Summary(1.0, 1.0, 1.0, lane.rounds), lane.rounds, 0.0, apart=False)
    logs, usual = lane.difference(one, other), lane.usual(one, other)
    if not logs:
        return None
    values = _clipped(logs, lane.typical(one, other))
    center, plain = _mean(values), moderated(values, usual, lane.alike)
    strict = moderated(values, usual, lane.alike, level(len(logs), lane.rounds))
    apart = abs(center) > strict
    reach = plain if apart else max(plain, strict)
    return Compared(around(center, reach, len(logs)), len(logs), _spread(logs, usual), apart)


def level(rounds: int, most: int) -> float:
    """The error that a comparison over so many rounds may have, where the leaders have `most` rounds.

    Cells that were eliminated at a look are judged at the level of this look, the leaders at what is left.
    The last round may be incomplete.
    """
    spent = list(zip(LOOKS, SPENT, strict=True))
    if rounds >= most - 1:
        return ERROR - math.fsum(error for look, error in spent if look < rounds)
    return next((error for look, error in spent if look >= rounds), SPENT[-1])


def speed(results: Results, record: RunRecord) -> Summary | None:
    """Samples per second of a paired cell; None if it has no blocks."""
    return cell_speed(results.blocks, record.cell) if record.cell else None


def cell_speed(blocks: Sequence[Block], cell: str) -> Summary | None:
    """The same for the key of a cell.

    The rounds follow each other within minutes, in which the machine may be slow or fast as a whole. So many
    rounds make a ratio more certain, but not a speed: its interval holds what another visit to the machine is
    likely to find.
    """
    lane = lane_of(blocks, cell)
    if lane is None:
        return None
    rates: dict[Round, list[float]] = {}
    for block in blocks:
        if block.cell == lane.baseline:
            rates.setdefault((block.session, block.round), []).append(math.log(block.samples_per_second))
    base, visits = [_mean(found) for found in rates.values()], len({session for session, _ in rates})
    center, rounds = _mean(base), len(base)
    reach = moderated(base, USUAL_NOISE**2, USUAL_FREEDOM) * math.sqrt(rounds / visits)
    ratio = compared(lane, cell, lane.baseline)
    if ratio and cell != lane.baseline:
        center, rounds = center + math.log(ratio.ratio.median), ratio.rounds
        reach = math.hypot(reach, math.log(ratio.ratio.high / ratio.ratio.median))
    return around(center, reach, rounds)


def variation(blocks: Sequence[Block], lane: Lane) -> float:
    """How much the speed of the baseline varied over the whole measurement: its standard deviation."""
    logs = [math.log(block.samples_per_second) for block in blocks if block.cell == lane.baseline]
    return statistics.stdev(logs) if len(logs) > 1 else 0.0


def decide(
    blocks: Sequence[Block],
    baseline: str,
    cells: Iterable[str],
    advantage: Mapping[str, Advantage] | None = None,
    least: int = 0,
) -> Decision:
    """Which of the cells need further rounds; to be called after every round, it acts at the looks.

    A cell with an `advantage` learns from fewer samples. Nothing is eliminated before `least` rounds. The
    baseline takes part, too: where nothing is faster, everything else is eliminated.
    """
    more, everything = advantage or {}, {baseline, *cells}
    lane = next((each for each in lanes(blocks) if each.baseline == baseline), Lane(baseline, {}))
    rounds, left = _complete(lane), set(everything)
    for look, spent in zip(LOOKS, SPENT, strict=True):
        if least <= look <= len(rounds):
            left -= _slower(_only(lane, rounds[:look]), left, spent, more)
    return Decision(everything - left, left, len(left) == 1 or len(rounds) >= LOOKS[-1])


def _slower(lane: Lane, cells: set[str], error: float, advantage: Mapping[str, Advantage]) -> set[str]:
    """The cells that are told apart from the fastest, or have stopped in an earlier round.

    Where it is not known how many samples they need, the leader is taken at its worst, the others at their
    best.
    """
    there = {cell for cell in cells if cell == lane.baseline or len(lane.values.get(cell, {})) == lane.rounds}

    def ahead(one: str, other: str) -> tuple[float, float]:
        """By how much one is faster than the other, and how far this may be from the truth."""
        if one == other:
            return 0.0, 0.0
        usual = lane.usual(one, other)
        values = _clipped(lane.difference(one, other), lane.typical(one, other))
        lead = _mean(values) + advantage.get(one, LEVEL).low - advantage.get(other, LEVEL).high
        return lead, moderated(values, usual, lane.alike, error)

    leader = max(sorted(there), key=lambda cell: ahead(cell, lane.baseline)[0])
    behind = cells - there
    for cell in there:
        lead, uncertain = ahead(leader, cell)
        if lead > uncertain:
            behind.add(cell)
    return behind


def _complete(lane: Lane) -> list[Round]:
    """The rounds that were not cut short: they have all cells that a later round has."""
    found: list[Round] = []
    later: set[str] = set()
    for at in sorted({at for values in lane.values.values() for at in values}, reverse=True):
        there = {cell for cell, values in lane.values.items() if at in values}
        found += [at] if there >= later else []
        later |= there
    return found[::-1]


def _only(lane: Lane, rounds: Sequence[Round]) -> Lane:
    """The lane with these rounds and no others."""
    kept = {cell: {at: values[at] for at in rounds if at in values} for cell, values in lane.values.items()}
    return Lane(lane.baseline, {cell: values for cell, values in kept.items() if values})


def _rows(blocks: Sequence[Block]) -> list[list[Block]]:
    """The blocks of each round of each task, which were measured one after the other."""
    found: list[list[Block]] = []
    for block in blocks:
        last = found[-1][-1] if found else None
        follows = last and (last.session, last.round, last.position + 1)
        if follows == (block.session, block.round, block.position):
            found[-1].append(block)
        else:
            found.append([block])
    return found


def _next_round(end: Block, start: Block) -> bool:
    """Whether a round of the same lane begins where the round before ended."""
    return (end.cell, end.session, end.round + 1) == (start.cell, start.session, start.round)


def _clipped(logs: Sequence[float], typical: float) -> list[float]:
    """The values with the far ones drawn nearer, and spread by as much as this hides of their variance.

    Where most of a few values are far, that would spread them more than they are: then they stay as they are.
    """
    middle, limit = statistics.median(logs), CLIP * math.sqrt(typical)
    near = [min(max(each, middle - limit), middle + limit) for each in logs]
    center, inside = _mean(near), sum(abs(each - middle) <= limit for each in logs)
    spread = [center + (each - center) * len(logs) / max(1, inside) for each in near]
    return list(logs) if _squares(spread) > _squares(logs) else spread


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _squares(values: Sequence[float]) -> float:
    center = _mean(values)
    return math.fsum((each - center) ** 2 for each in values)


def _spread(logs: Sequence[float], usual: float) -> float:
    """The standard deviation of the values; of one value, the usual one."""
    return statistics.stdev(logs) if len(logs) > 1 else math.sqrt(usual)
