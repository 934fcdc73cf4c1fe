"""Made-up paired blocks: a machine that drifts, noisy blocks, and a study that eliminates as it goes."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from manyhands.analysis.pairs import Advantage, Decision, Lane, decide
from manyhands.records.study_results import Block

BASELINE = "baseline"


class Machine(NamedTuple):
    """How the speed of a machine varies: standard deviations are relative."""

    drift: float = 0.075  # over minutes: 15 % between its good and its bad times are two of these
    memory: float = 90.0  # seconds, after which little is left of a drift
    noise: float = 0.035  # of one block
    spells: float = 0.02  # the share of blocks that something else slows down
    slowdown: float = 0.25  # in such a block
    block: float = 1.1  # seconds, including the change to another cell

    def moods(self, chance: random.Random) -> Iterator[float]:
        """The logarithm of the speed of one block after the other, without the noise of a block."""
        kept = math.exp(-self.block / self.memory)
        now = chance.gauss(0, self.drift)
        while True:
            yield now
            now = kept * now + math.sqrt(1 - kept**2) * chance.gauss(0, self.drift)

    def disturbance(self, chance: random.Random) -> float:
        """What is special to one block."""
        return chance.gauss(0, self.noise) - (self.slowdown if chance.random() < self.spells else 0.0)


Measure = Callable[
    [str, int], float
]  # samples per second in the next block of a cell, which is in this round


def drifting(speeds: Mapping[str, float], machine: Machine, chance: random.Random) -> Measure:
    """Measure on a made-up machine; `speeds` are those of its usual times."""
    moods = machine.moods(chance)
    return lambda cell, _: speeds[cell] * math.exp(next(moods) + machine.disturbance(chance))


def resampled(lane: Lane, speeds: Mapping[str, float], chance: random.Random) -> Measure:
    """Measure by drawing from rounds that were recorded: the noise is real, the speeds are made up.

    The values of a round stay together, so that what its cells have in common remains so. Each cell draws
    from another recorded one, as long as there are enough of them.
    """
    centers = {cell: statistics.fmean(values.values()) for cell, values in lane.values.items()}
    rounds: dict[tuple[int, int], list[float]] = {}
    for cell, values in lane.values.items():
        wider = math.sqrt(len(values) / max(1, len(values) - 1))  # a mean of few is too near to its values
        for at, value in values.items():
            rounds.setdefault(at, []).append(wider * (value - centers[cell]))
    drawn: dict[int, list[float]] = {}

    def measure(cell: str, number: int) -> float:
        if cell == BASELINE:  # its noise is in the values
            return speeds[cell]
        if not drawn.get(number):
            found = chance.choice(list(rounds.values()))
            drawn[number] = chance.sample(found, len(found))
        return speeds[cell] * math.exp(drawn[number].pop())

    return measure


def paired_study(
    cells: list[str], measure: Measure, budget: int, advantage: Mapping[str, Advantage] | None = None
) -> tuple[list[Block], Decision]:
    """Measure in rounds, as a study does, until so many blocks are spent or nothing is left to tell apart."""
    blocks: list[Block] = []
    decision = Decision(set(), {BASELINE, *cells}, settled=False)
    number = 0
    while not decision.settled:
        left = [cell for cell in cells if cell in decision.leaders]
        turn = number % len(left) if left else 0
        order = [BASELINE]
        for cell in left[turn:] + left[:turn]:
            order += [cell, BASELINE]
        if len(blocks) + len(order) > budget:
            break
        for position, cell in enumerate(order):
            blocks.append(Block(cell, number, position, measure(cell, number), 20, 1.0))
        decision = decide(blocks, BASELINE, cells, advantage)
        number += 1
    return blocks, decision
