"""How often the 95 % intervals of the critical batch hold it, in simulated studies of many kinds.

The table is in benchmarks/trust/README.md. Nothing is trained: a thousand studies take about a minute.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from typing import NamedTuple

from manyhands.analysis.regimes import is_open_above, is_open_below, regimes
from manyhands.testing.simulated import Simulated

NOISES = (0.05, 0.15, 0.3)
BATCHES = {
    4: (32, 256, 2048, 16_384),
    5: (16, 64, 256, 1024, 4096),
    6: (16, 64, 256, 1024, 4096, 16_384),
    7: (8, 32, 128, 512, 2048, 8192, 32_768),
}
FIVE = BATCHES[5]
KINDS = {
    **{f"{count} batches": Simulated(batches=batches) for count, batches in BATCHES.items()},
    "5 batches, all below it": Simulated(batches=(8, 16, 32, 64, 128)),
    "5 batches, all above it": Simulated(batches=(1024, 2048, 4096, 8192, 16_384)),
    "6 batches, large end not reached": Simulated(batches=BATCHES[6], limit=200 * (1024 + 400) * 1.3),
    "best of 3 rates": Simulated(batches=FIVE, rates=3),
    "3 seeds": Simulated(batches=FIVE, seeds=3),
    "3 batches, 3 seeds": Simulated(batches=(64, 512, 4096), seeds=3),
    "best of 3 rates, 2 seeds": Simulated(batches=FIVE, rates=3, seeds=2),
    "best of 3 rates, 3 seeds, end not reached": Simulated(
        batches=BATCHES[6], rates=3, seeds=3, limit=200 * (1024 + 400) * 1.3
    ),
    "evaluations far apart": Simulated(batches=FIVE, spacing=12_000),
}


class Row(NamedTuple):
    """What came of the studies of one kind."""

    kind: str
    noise: float
    studies: int
    held: float  # the share of intervals that hold the truth; one that is refused promises nothing
    refused: float  # the share of studies whose steps vary too much to tell
    open: float  # the share of those told whose interval has one end only
    factor: float  # median over studies with both ends: sqrt(high / low)
    bias: float  # the median estimate over the truth


def measure(kind: str, noise: float, studies: int, seed: int = 0) -> Row:
    """Simulate studies of one kind, and count."""
    world = KINDS[kind]._replace(noise=noise)
    chance = random.Random(f"{kind} {noise} {seed}")
    truth, held, told, opened = world.truth.b_crit, 0, [], 0
    for _ in range(studies):
        (fit,) = regimes(world.records(chance))
        if fit.b_crit is None:
            continue
        told.append(fit.b_crit)
        held += fit.b_crit.low <= truth <= fit.b_crit.high
        opened += is_open_above(fit.b_crit) or is_open_below(fit.b_crit)
    count = len(told)
    factors = [
        (each.high / each.low) ** 0.5 for each in told if not (is_open_above(each) or is_open_below(each))
    ]
    return Row(
        kind,
        noise,
        studies,
        held / count if count else 1.0,
        1 - count / studies,
        opened / count if count else 0.0,
        statistics.median(factors) if factors else float("inf"),
        statistics.median(each.value for each in told) / truth if told else float("nan"),
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--studies", type=int, default=400, help="per row of the table")
    options.add_argument("--only", help="kinds whose name contains this")
    options.add_argument("--json", action="store_true")
    wanted = options.parse_args()
    kinds = [kind for kind in KINDS if not wanted.only or wanted.only in kind]
    rows = []
    if not wanted.json:
        print("| studies | noise | holds it | refused | one end open | within a factor of | bias |")
        print("|---|---|---|---|---|---|---|")
    for kind in kinds:
        for noise in NOISES:
            row = measure(kind, noise, wanted.studies)
            rows.append(row._asdict())
            if not wanted.json:
                shares = " | ".join(f"{share:.1%}" for share in (row.held, row.refused, row.open))
                print(f"| {kind} | {noise:.0%} | {shares} | {row.factor:.2f} | {row.bias:.2f} |", flush=True)
    if wanted.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
