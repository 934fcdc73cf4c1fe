"""Simulate paired studies: how often are equal cells told apart, and how often is a real difference found?

python benchmarks/trust/pairs.py                         # on a made-up machine
python benchmarks/trust/pairs.py results/default         # with the noise of recorded blocks

Every simulated study measures in rounds and eliminates as a real one does (`manyhands.analysis.pairs`), until
its blocks are spent: as many as eight rounds of all of its cells would take.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from manyhands.analysis.pairs import Lane, compared, lanes
from manyhands.records.study_results import StudyFolder
from manyhands.testing.paired_blocks import BASELINE, Machine, Measure, drifting, paired_study, resampled

FAST = 1.7  # times the baseline
LOSERS = {"threads": 1.4, "pipeline": 1.2, "four": 1.0, "layers": 0.8}
Source = Callable[[Mapping[str, float], random.Random], Measure]


class Outcome(NamedTuple):
    """What many simulated studies found about one pair of cells."""

    told: float  # the share of studies that told them apart
    right: float  # and said the right one to be faster
    against_best: (
        float  # the share of comparisons of equal cells with the fastest of them that were told apart
    )
    rounds: float  # of the leaders, on average
    spread: float  # from round to round, relative, on average


def simulate(source: Source, speeds: Mapping[str, float], studies: int, rounds: int, seed: int) -> Outcome:
    """Compare the first two cells in many simulated studies."""
    chance = random.Random(seed)
    cells = [cell for cell in speeds if cell != BASELINE]
    equal = [cell for cell in cells if speeds[cell] == max(speeds.values())]
    told = right = against = pairs = 0
    measured = spread = 0.0
    for _ in range(studies):
        blocks, _ = paired_study(cells, source(speeds, chance), rounds * (2 * len(cells) + 1))
        (lane,) = lanes(blocks)
        found = compared(lane, cells[0], cells[1])
        assert found is not None
        told, right = told + found.apart, right + (found.apart and found.ratio.low > 1)
        measured, spread = measured + lane.rounds / studies, spread + found.spread / studies
        best = max(equal, key=lambda cell: _gain(lane, cell))
        for other in equal:
            if other != best and (again := compared(lane, best, other)):
                against, pairs = against + again.apart, pairs + 1
    return Outcome(told / studies, right / studies, against / max(1, pairs), measured, spread)


def _gain(lane: Lane, cell: str) -> float:
    found = compared(lane, cell, BASELINE)
    return found.ratio.median if found else 0.0


def made_up() -> dict[str, Source]:
    """Machines that drift by 15 % over minutes, with blocks of different noise and with slow spells."""

    def of(noise: float) -> Source:
        return lambda speeds, chance: drifting(speeds, Machine(noise=noise), chance)

    return {f"blocks vary by {noise:.1%}": of(noise) for noise in (0.02, 0.035, 0.05, 0.3)}


def recorded(folder: Path) -> dict[str, Source]:
    """The noise of the lanes of a study."""

    def of(lane: Lane) -> Source:
        return lambda speeds, chance: resampled(lane, speeds, chance)

    found = [lane for lane in lanes(StudyFolder(folder).read().blocks) if lane.rounds > 1]
    return {f"lane of {lane.baseline}, {lane.rounds} rounds": of(lane) for lane in found}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Simulate paired studies.")
    parser.add_argument("folder", nargs="?", type=Path, help="a study whose blocks are resampled")
    parser.add_argument("--studies", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=8, help="of all cells, that the budget is enough for")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sources = recorded(given.folder) if given.folder else made_up()
    if not sources:
        parser.error(f"{given.folder} has no paired rounds")
    base = {BASELINE: 1.0}
    cases = {
        "equal, 2 cells": {"a": FAST, "b": FAST},
        "equal, 2 of 6 cells": {"a": FAST, "b": FAST} | LOSERS,
        "equal, 6 cells": dict.fromkeys("abcdef", FAST),
        "10 % apart, 2 of 6 cells": {"a": FAST, "b": FAST / 1.1} | LOSERS,
        "5 % apart, 2 of 6 cells": {"a": FAST, "b": FAST / 1.05} | LOSERS,
    }
    for name, source in sources.items():
        print(f"{name}; {given.studies} studies, blocks for {given.rounds} rounds of all cells")
        print(
            f"  {'cells':26}{'told apart':>12}{'rightly':>9}{'from the best':>15}{'rounds':>8}{'spread':>8}"
        )
        for label, speeds in cases.items():
            got = simulate(source, base | speeds, given.studies, given.rounds, given.seed)
            equal = label.startswith("equal")
            print(
                f"  {label:26}{got.told:>12.1%}{'' if equal else f'{got.right:.1%}':>9}"
                f"{f'{got.against_best:.1%}' if equal else '':>15}{got.rounds:>8.1f}{got.spread:>8.1%}"
            )


if __name__ == "__main__":
    main()
