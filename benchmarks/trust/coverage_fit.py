"""How often the 95 % intervals of the critical batch and of the noise scale hold them, in simulated studies.

Nothing is trained: a thousand studies take about a minute. `--only` names some of the kinds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from manyhands.analysis.noise_scale import noise_scales
from manyhands.analysis.regimes import is_open_above, is_open_below, regimes
from manyhands.testing.simulated import Simulated
from manyhands.testing.simulated_noise import TRUE_SCALE, simulated_noise

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


NOISE_BATCHES = (32, 128, 512, 2048)  # the true noise scale is 381
BETWEEN = (0.05, 0.15)  # the spread of the noise scale between seeds


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
    closed = [each for each in told if not (is_open_above(each) or is_open_below(each))]
    factors = [(each.high / each.low) ** 0.5 for each in closed]
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


def measure_noise(kind: str, batch: int, seeds: int, between: float, studies: int) -> Row:
    """Simulate the noise scale of runs at one batch, and count."""
    chance = np.random.default_rng([batch, seeds, round(100 * between)])
    told = []
    for _ in range(studies):
        runs = [simulated_noise(batch, chance, between=between, seed=seed) for seed in range(seeds)]
        (found,) = noise_scales(runs)
        if found.scale is not None:
            told.append(found.scale)
    count = max(1, len(told))
    held = sum(each.low <= TRUE_SCALE <= each.high for each in told)
    factor = statistics.median((each.high / each.low) ** 0.5 for each in told)
    bias = statistics.median(each.value for each in told) / TRUE_SCALE
    return Row(kind, between, studies, held / count, 1 - len(told) / studies, 0.0, factor, bias)


def rows(studies: int, only: str) -> Iterator[Row]:
    """One row per kind of study and noise, as soon as it is there."""
    for kind in KINDS:
        if only in kind:
            yield from (measure(kind, noise, studies) for noise in NOISES)
    for batch in NOISE_BATCHES:
        for seeds in (1, 3):
            kind = f"noise scale at batch {batch:,}, {seeds} seed{'s' if seeds > 1 else ''}"
            if only in kind:
                yield from (measure_noise(kind, batch, seeds, between, studies) for between in BETWEEN)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--studies", type=int, default=400, help="per row of the table")
    options.add_argument("--only", default="", help="kinds whose name contains this")
    options.add_argument("--json", action="store_true")
    wanted = options.parse_args()
    found = rows(wanted.studies, wanted.only)
    if wanted.json:
        print(json.dumps([row._asdict() for row in found], indent=2))
        return
    print("| studies | noise | holds it | refused | one end open | within a factor of | bias |")
    print("|---|---|---|---|---|---|---|")
    for row in found:
        shares = " | ".join(f"{share:.1%}" for share in (row.held, row.refused, row.open))
        print(f"| {row.kind} | {row.noise:.0%} | {shares} | {row.factor:.2f} | {row.bias:.2f} |", flush=True)


if __name__ == "__main__":
    main()
