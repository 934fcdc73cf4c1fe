"""Records by seed: what is compared shares its seed, so that most of the chance cancels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from manyhands.analysis import groups
from manyhands.claims.base import SEEDS
from manyhands.core import formatting
from manyhands.records.record import RunRecord

BySeed = dict[int, float]
LEVEL = 0.05  # relative: two rates that differ less are equally good


def by_seed(records: Iterable[RunRecord], value: Callable[[RunRecord], float | None]) -> BySeed:
    """The value of each seed; the mean over its repeats."""
    found: dict[int, list[float]] = {}
    for record in records:
        if (number := value(record)) is not None:
            found.setdefault(record.spec.seed, []).append(number)
    return {seed: sum(values) / len(values) for seed, values in found.items()}


def geometric_mean(found: BySeed) -> float:
    """Over seeds."""
    return math.exp(math.fsum(map(math.log, found.values())) / len(found))


def rates(records: Iterable[RunRecord]) -> list[list[RunRecord]]:
    """The records by recipe: one group per learning rate that was tried, in ascending order."""
    found: dict[str, list[RunRecord]] = {}
    for record in records:
        found.setdefault(groups.recipe_key(record), []).append(record)
    return sorted(found.values(), key=lambda group: float(group[0].recipe.get("lr") or 0.0))


def edge(needed: Sequence[float], best: int) -> str:
    """At which end of the rates that were tried the best one is; empty if a better one is not to be expected.

    `needed` is what each rate needed, in ascending order of the rates, and infinite where it did not arrive.
    At an end that is hardly better than its neighbor the optimum is near.
    """
    if len(needed) == 1:
        return "only one"
    if 0 < best < len(needed) - 1:
        return ""
    inward = needed[1] if best == 0 else needed[-2]
    if inward <= (1 + LEVEL) * needed[best]:
        return ""
    return "smallest" if best == 0 else "largest"


def fewest(sides: Iterable[Sequence[RunRecord]]) -> int:
    """The number of seeds that every side has."""
    shared = [{record.spec.seed for record in side} for side in sides]
    return len(set.intersection(*shared)) if shared else 0


def too_few(seeds: int) -> str:
    """Why a number of seeds cannot refute a claim; empty if it can."""
    return "" if seeds >= SEEDS else f"{formatting.plural(seeds, 'seed')} of the {SEEDS} that are needed"


def seconds(records: Iterable[RunRecord]) -> float:
    """The seconds that the runs took, one after the other."""
    return sum(record.seconds for record in records)
