"""How often intervals hold the truth: every kind that a report prints, simulated where the truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from manyhands.analysis import pairs
from manyhands.analysis.target import to_target
from manyhands.core.statistics import Summary, measured, ratio
from manyhands.records.record import Evaluation, RunRecord
from manyhands.records.study_results import Block
from manyhands.testing.paired_blocks import BASELINE, Machine, drifting, paired_study
from manyhands.testing.records import record

SPEEDS = {BASELINE: 8_000.0, "a": 13_600.0, "b": 12_800.0, "c": 9_600.0}
RUNS = 0.08  # relative standard deviation of the speeds of separate runs, on a usual machine
SEEDS = 0.06  # the same of the samples that seeds need, for a usual task
SAMPLES = 76_800.0  # to the target, in the median
BATCH = 256
Case = Callable[[random.Random], tuple[Summary | None, float]]  # an interval and the truth


def cases() -> dict[str, Case]:
    """All kinds of intervals, each with a simulation that knows the truth."""
    return {
        "speed-up, 3 paired rounds": lambda chance: (_compared(chance, 3, BASELINE), 1.7),
        "speed-up, 8 paired rounds": lambda chance: (_compared(chance, 8, BASELINE), 1.7),
        "one cell over another, 8 paired rounds": lambda chance: (_compared(chance, 8, "b"), 13.6 / 12.8),
        "speed, 8 paired rounds": lambda chance: (pairs.cell_speed(_blocks(chance, 8), "a"), SPEEDS["a"]),
        "speed, 1 run": lambda chance: (_runs(chance, 1), 1_000.0),
        "speed, 3 runs": lambda chance: (_runs(chance, 3), 1_000.0),
        "speed-up, 1 run of each": lambda chance: (_ratio(chance, 1), 1.0),
        "speed-up, 3 runs of each": lambda chance: (_ratio(chance, 3), 1.0),
        "samples to target, 1 seed": lambda chance: (_samples(chance, 1), SAMPLES),
        "samples to target, 3 seeds": lambda chance: (_samples(chance, 3), SAMPLES),
        "samples to target, 3 seeds, few evaluations": lambda chance: (_samples(chance, 3, 12_000), SAMPLES),
        "time to target, 3 timed runs": lambda chance: (_timed(chance, 3), SAMPLES / 1_000),
        "time to target, 3 seeds x 8 paired rounds": lambda chance: (_product(chance), SAMPLES / SPEEDS["a"]),
    }


def coverage(case: Case, times: int, seed: int = 0) -> float:
    """The share of simulated intervals that hold the truth."""
    chance, held = random.Random(seed), 0
    for _ in range(times):
        found, truth = case(chance)
        assert found is not None
        held += found.low <= truth <= found.high
    return held / times


def learning_run(
    chance: random.Random, seed: int, spread: float, every: int = 3_000, **fields: Any
) -> RunRecord:
    """A run that crosses its target somewhere between two evaluations, which are a little noisy."""
    crossing, target = SAMPLES * math.exp(chance.gauss(0, spread)), 0.97
    curve: list[Evaluation] = []
    while not curve or (curve[-1].metric or 0.0) < target:
        at = every * (len(curve) + 1)
        metric = target + 0.02 * math.log(at / crossing) + chance.gauss(0, 0.0003)
        curve.append(Evaluation(step=at // BATCH, samples=at, seconds=at / 1_000, metric=metric))
    end = curve[-1]
    reached = {"target_samples": end.samples, "target_seconds": end.seconds, "target_steps": end.step}
    values: dict[str, Any] = reached | fields
    return record(batch=BATCH, seed=seed, target=target, curve=curve, **values)


def _blocks(chance: random.Random, rounds: int) -> list[Block]:
    budget = rounds * (2 * len(SPEEDS) - 1)
    return paired_study(list(SPEEDS)[1:], drifting(SPEEDS, Machine(), chance), budget)[0]


def _compared(chance: random.Random, rounds: int, other: str) -> Summary | None:
    found = pairs.compare_cells(_blocks(chance, rounds), "a", other)
    return found.ratio if found else None


def _noise(chance: random.Random, usual: float) -> float:
    """How noisy this machine or task is: some are much noisier than usual, and a study cannot choose."""
    return usual * math.sqrt(4 / chance.gammavariate(2, 2))  # the inverse of chi-square with 4 degrees


def _runs(chance: random.Random, runs: int, noise: float | None = None) -> Summary:
    """Separate runs, each of which meets the machine in another mood."""
    spread = noise or _noise(chance, RUNS)
    return measured([1_000 * math.exp(chance.gauss(0, spread)) for _ in range(runs)])


def _ratio(chance: random.Random, runs: int) -> Summary:
    noise = _noise(chance, RUNS)
    return ratio(_runs(chance, runs, noise), _runs(chance, runs, noise))


def _samples(chance: random.Random, seeds: int, every: int = 3_000) -> Summary | None:
    spread = _noise(chance, SEEDS)
    (found,) = to_target([learning_run(chance, seed, spread, every, timed=False) for seed in range(seeds)])
    return found.samples


def _timed(chance: random.Random, runs: int) -> Summary | None:
    made, spread = [], _noise(chance, SEEDS)
    for seed in range(runs):
        run, slower = learning_run(chance, seed, spread), math.exp(chance.gauss(0, 0.05))
        curve = [each.model_copy(update={"seconds": each.seconds * slower}) for each in run.curve]
        made.append(run.model_copy(update={"curve": curve, "target_seconds": curve[-1].seconds}))
    (found,) = to_target(made)
    return found.seconds


def _product(chance: random.Random) -> Summary | None:
    speed = record(batch=BATCH, threads=2, steps_to_target=None, cell="a", paired=True, split_matters=False)
    spread = _noise(chance, SEEDS)
    learned = [learning_run(chance, seed, spread, timed=False, split_matters=False) for seed in range(3)]
    found = to_target([speed, *learned], None, _blocks(chance, 8))
    return next(each.seconds for each in found if each.cell == "a")
