"""Speeds compared in pairs: a block of a cell next to blocks of the baseline, so that drift cancels.

    round 0:  B  c1  B  c2  B  c3  B          B: the baseline, one worker with one thread
    round 1:  B  c2  B  c3  B  c1  B          value of c2 = log(c2) - (log(B before) + log(B after)) / 2

A machine that is 15 % slower in one minute than in the next one is slower for neighbors alike. Cells are
compared by the differences of their values in the rounds that they share.

Rounds are added until the leaders are told apart or the budget is spent. Who looks again and again at growing
data finds a difference sooner or later where there is none. So there are a few looks, after numbers of rounds
that are fixed in advance, and the error of 5 % per comparison is divided among them: what is left is for the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from manyhands.core.statistics import CONFIDENCE, USUAL_FREEDOM, USUAL_NOISE, Summary, around, moderated
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Block, Results

LOOKS = (3, 5, 8, 12, 17, 23)  # rounds after which cells may be eliminated
SPENT = (0.004, 0.006, 0.007, 0.007, 0.007, 0.007)  # the error of each look; 0.012 is left for the end
ERROR = 1 - CONFIDENCE
# The variance of one value, as far as is known before anything is measured: blocks that vary by 3 to 4 %.
USUAL_PAIR = 0.04**2

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

    eliminated: set[str]  # slower than the leader
    leaders: set[str]  # not told apart from the fastest
    settled: bool  # further rounds would tell nothing more


class Lane(NamedTuple):
    """The paired values of all cells that have the same baseline, in the order of their rounds."""

    baseline: str
    values: Mapping[str, Values]

    @property
    def variance(self) -> float:
        """The variance of one value, over all cells."""
        squares, freedom = USUAL_FREEDOM * USUAL_PAIR, float(USUAL_FREEDOM)
        for values in self.values.values():
            center = _mean(list(values.values()))
            squares += math.fsum((each - center) ** 2 for each in values.values())
            freedom += len(values) - 1
        return squares / freedom

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

    def usual(self, *cells: str) -> float:
        """The variance of such a difference, over all cells; the baseline's noise is in every value."""
        return self.variance * len(set(cells) - {self.baseline})


def lanes(blocks: Sequence[Block]) -> list[Lane]:
    """The values of all paired cells. A block without a baseline block on both sides has none."""
    found: dict[str, dict[str, dict[Round, float]]] = {}
    for before, block, after in zip(blocks, blocks[1:], blocks[2:], strict=False):
        if block.position % 2 and before.cell == after.cell and _neighbors(before, block, after):
            sides = math.log(before.samples_per_second) + math.log(after.samples_per_second)
            values = found.setdefault(before.cell, {}).setdefault(block.cell, {})
            values[block.session, block.round] = math.log(block.samples_per_second) - sides / 2
    return [Lane(baseline, values) for baseline, values in found.items()]


def lane_of(blocks: Sequence[Block], *cells: str | None) -> Lane | None:
    """The lane that all of these cells are in."""
    for lane in lanes(blocks):
        if all(cell == lane.baseline or cell in lane.values for cell in cells):
            return lane
    return None


def compare(results: Results, one: RunRecord, other: RunRecord) -> Compared | None:
    """How many times as fast `one` is as `other`; None if they were not measured in the same rounds."""
    lane = lane_of(results.blocks, one.cell, other.cell)
    if lane is None or one.cell is None or other.cell is None:
        return None
    return compared(lane, one.cell, other.cell)


def compared(lane: Lane, one: str, other: str) -> Compared | None:
    """The same for the keys of two cells of a lane."""
    if one == other:
        return Compared(Summary(1.0, 1.0, 1.0, lane.rounds), lane.rounds, 0.0, False)  # itself: noise cancels
    logs, usual = lane.difference(one, other), lane.usual(one, other)
    if not logs:
        return None
    center = _mean(logs)
    strict = moderated(logs, usual, USUAL_FREEDOM, level(len(logs), lane.rounds))
    plain = moderated(logs, usual, USUAL_FREEDOM)
    apart = abs(center) > strict
    reach = plain if apart else max(plain, strict)
    return Compared(around(center, reach, len(logs)), len(logs), _spread(logs, usual), apart)


def level(rounds: int, most: int) -> float:
    """The error that a comparison over so many rounds may have, where the leaders have `most` rounds.

    Cells that were eliminated at a look are judged at the level of this look, the leaders at what is left.
    The last round may be incomplete.
    """
    if rounds >= most - 1:
        return ERROR - math.fsum(spent for look, spent in zip(LOOKS, SPENT, strict=True) if look < rounds)
    return next((spent for look, spent in zip(LOOKS, SPENT, strict=True) if look >= rounds), SPENT[-1])


def speed(results: Results, record: RunRecord) -> Summary | None:
    """Samples per second of a paired cell.

    The rounds follow each other within minutes, in which the machine may be slow or fast as a whole. So many
    rounds make a ratio more certain, but not a speed: its interval holds what another visit to the machine is
    likely to find.
    """
    lane = lane_of(results.blocks, record.cell)
    if lane is None or record.cell is None:
        return None
    rates: dict[Round, list[float]] = {}
    for block in results.blocks:
        if block.cell == lane.baseline:
            rates.setdefault((block.session, block.round), []).append(math.log(block.samples_per_second))
    base, visits = [_mean(found) for found in rates.values()], len({session for session, _ in rates})
    reach = moderated(base, USUAL_NOISE**2, USUAL_FREEDOM) * math.sqrt(len(base) / visits)
    center, rounds = _mean(base), len(base)
    if record.cell != lane.baseline:
        logs = lane.difference(record.cell, lane.baseline)
        center, rounds = center + _mean(logs), len(logs)
        reach = math.hypot(reach, moderated(logs, lane.variance, USUAL_FREEDOM))
    return around(center, reach, rounds)


def decide(
    blocks: Sequence[Block], baseline: str, cells: Iterable[str], advantage: Mapping[str, float] | None = None
) -> Decision:
    """Which of the cells need further rounds; to be called after every round, it acts at the looks.

    `advantage` is the logarithm of the samples to the target that a reference needs over those that the cell
    needs, where this is known; where it is uncertain, give the end of its interval that favors the cell. The
    baseline takes part, too: where nothing is faster, everything else is eliminated.
    """
    more, everything = advantage or {}, {baseline, *cells}
    lane = next((each for each in lanes(blocks) if each.baseline == baseline), Lane(baseline, {}))
    rounds, left = _complete(lane), set(everything)
    for look, spent in zip(LOOKS, SPENT, strict=True):
        if look <= len(rounds):
            left -= _slower(_only(lane, rounds[:look]), left, spent, more)
    return Decision(everything - left, left, len(left) == 1 or len(rounds) >= LOOKS[-1])


def _complete(lane: Lane) -> list[Round]:
    """The rounds that were not cut short: they have all cells that a later round has."""
    found: list[Round] = []
    later: set[str] = set()
    for at in sorted({at for values in lane.values.values() for at in values}, reverse=True):
        there = {cell for cell, values in lane.values.items() if at in values}
        found += [at] if there >= later else []
        later |= there
    return found[::-1]


def _slower(lane: Lane, cells: set[str], error: float, advantage: Mapping[str, float]) -> set[str]:
    """The cells that are told apart from the fastest, or have stopped in an earlier round."""
    there = {cell for cell in cells if cell == lane.baseline or len(lane.values.get(cell, {})) == lane.rounds}

    def ahead(one: str, other: str) -> float:
        logs = lane.difference(one, other)
        return _mean(logs) + advantage.get(one, 0.0) - advantage.get(other, 0.0)

    leader = max(sorted(there), key=lambda cell: ahead(cell, lane.baseline) if cell != lane.baseline else 0.0)
    behind = cells - there
    for cell in there - {leader}:
        logs = lane.difference(leader, cell)
        if ahead(leader, cell) > moderated(logs, lane.usual(leader, cell), USUAL_FREEDOM, error):
            behind.add(cell)
    return behind


def _only(lane: Lane, rounds: Sequence[Round]) -> Lane:
    """The lane with these rounds and no others."""
    kept = {cell: {at: values[at] for at in rounds if at in values} for cell, values in lane.values.items()}
    return Lane(lane.baseline, {cell: values for cell, values in kept.items() if values})


def _neighbors(*blocks: Block) -> bool:
    """Whether the blocks were measured one after the other in the same round."""
    first = blocks[0]
    follows = [(first.session, first.round, first.position + n) for n in range(len(blocks))]
    return [(each.session, each.round, each.position) for each in blocks] == follows


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _spread(logs: Sequence[float], usual: float) -> float:
    """The standard deviation of the values; of one value, the usual one."""
    center = _mean(logs)
    squares = math.fsum((each - center) ** 2 for each in logs)
    return math.sqrt(squares / (len(logs) - 1) if len(logs) > 1 else usual)
