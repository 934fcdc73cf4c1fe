"""Whether the noise of gradients predicts the critical batch: both for several targets of the same runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from manyhands.analysis import groups
from manyhands.analysis.noise_scale import by_target
from manyhands.claims import published
from manyhands.claims.base import Claim, Finding, Part, Row, settled_by, together, unsettled
from manyhands.claims.plots import Dot, Line, Plot
from manyhands.claims.seeds import fewest, seconds, too_few
from manyhands.core import formatting
from manyhands.core.statistics import Estimate
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results

TARGETS = (0.90, 0.92, 0.94, 0.95, 0.96, 0.965, 0.97, 0.975, 0.98)
ALIKE = 0.8  # rank correlation from which two quantities rise together
FACTOR = 5.0  # McCandlish et al. find a factor of 4.5 on MNIST
FEWEST = 4  # targets: fewer always correlate
RISE = 2.0  # the critical batch must grow so many times, or there is nothing to follow
DRAWS = 50  # of seeds, if there are too many combinations
SEED = 20181214


class Followed(NamedTuple):
    """The critical batch for one target, and the noise scale on the way there."""

    target: float
    critical: Estimate
    noise: Estimate


def judge(results: Results) -> Finding:
    """Correlate the two over the targets, and say how far they are apart."""
    parts: list[Part] = []
    table: list[Row] = []
    plots: list[Plot] = []
    for task in groups.tasks(results.records):
        mine = groups.of_task(results.records, task)
        found = followed(mine)
        if len(found) < 2:
            continue
        seeds = fewest(_cells(mine))
        parts += [settled_by(part, seeds, seconds(mine)) for part in _parts(task, mine, found)]
        table += [_row(task, each) for each in found]
        plots += _plots(task, found)
    if not parts:
        return unsettled("this needs runs with noise_scale to a target, at four batches or more")
    beside = "Published (McCandlish et al. 2018, MNIST): noise scale 900 and critical batch 200, 4.5x apart."
    return together(parts, table, beside, plots)


def followed(records: Sequence[RunRecord]) -> list[Followed]:
    """Both quantities for the targets whose critical batch lies within the batches that were run."""
    batches = {groups.batch(record) for record in records}
    return [
        Followed(each.target, each.critical, each.noise)
        for task in groups.tasks(records)
        for each in by_target(records, task, TARGETS)
        if each.critical and each.noise and min(batches) <= each.critical.value <= max(batches)
    ]


def _cells(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """The records by batch and recipe."""
    found: dict[tuple[int, str], list[RunRecord]] = {}
    for record in records:
        found.setdefault((groups.batch(record), groups.recipe_key(record)), []).append(record)
    return list(found.values())


def _parts(task: str, records: Sequence[RunRecord], found: Sequence[Followed]) -> list[Part]:
    draws = _draws(records)
    drawn = {seeds: followed(_drawn(records, seeds)) for seeds in set(draws)}
    again = [drawn[seeds] for seeds in draws if len(drawn[seeds]) >= min(FEWEST, len(found))]
    weak = too_few(fewest(_cells(records)))
    few = ""
    if len(found) < FEWEST:
        few = f"{formatting.plural(len(found), 'target')} could be followed, and {FEWEST} are needed"
    grown = max(each.critical.value for each in found) / min(each.critical.value for each in found)
    if grown < RISE:
        weak = f"the critical batch grows only {grown:.1f}x between the targets"
    return [_rise(task, found, again, weak, few), _apart(task, found, again, weak, few)]


def _rise(
    task: str, found: Sequence[Followed], again: Sequence[Sequence[Followed]], weak: str, few: str
) -> Part:
    alike = _quantiles(correlation(found), map(correlation, again))
    first, last = found[0], found[-1]
    text = (
        f"{task}: from {_percent(first.target)} to {_percent(last.target)}, the critical batch goes from "
        f"{first.critical.value:,.0f} to {last.critical.value:,.0f} and the noise scale from "
        f"{first.noise.value:,.0f} to {last.noise.value:,.0f}, with a rank correlation of {alike.value:.2f} "
        f"({alike.low:.2f} to {alike.high:.2f}) over {formatting.plural(len(found), 'target')}"
    )
    return Part(f"{task}: they rise together", alike, ALIKE, True, text, weak, few)


def _apart(
    task: str, found: Sequence[Followed], again: Sequence[Sequence[Followed]], weak: str, few: str
) -> Part:
    between = apart(found)
    drawn = _quantiles(between, map(apart, again))
    # the fits are less sure than the seeds say: no curve is exactly the model's
    fits = [math.log(each.critical.high / each.critical.low) / 2 for each in found]
    scales = [math.log(each.noise.high / each.noise.low) / 2 for each in found]
    width = math.hypot(*(sum(widths) / len(found) for widths in (fits, scales)))
    down = math.hypot(math.log(between / drawn.low) if drawn.low > 0 else math.inf, width)
    up = math.hypot(math.log(drawn.high / between), width)
    factor = Estimate(between, max(1.0, between * math.exp(-down)), between * math.exp(up))
    text = f"they are {between:.1f}x ({factor.low:.1f}x to {factor.high:.1f}x) apart"
    return Part(f"{task}: how far apart", factor, FACTOR, False, text, weak, few, unit="x")


def _percent(target: float) -> str:
    return formatting.threshold(target, "accuracy")


def _drawn(records: Sequence[RunRecord], seeds: Sequence[int]) -> list[RunRecord]:
    """The runs of these seeds, as often as each of them was drawn."""
    return [
        record.model_copy(update={"run": f"{record.run}-{number}"})
        for number, seed in enumerate(seeds)
        for record in records
        if record.spec.seed == seed
    ]


def _draws(records: Iterable[RunRecord]) -> list[tuple[int, ...]]:
    """Draws of as many seeds as there are, with replacement: all of them if they are few."""
    seeds = sorted({record.spec.seed for record in records})
    if len(seeds) ** len(seeds) <= DRAWS:
        return [tuple(sorted(draw)) for draw in itertools.product(seeds, repeat=len(seeds))]
    random = np.random.default_rng(SEED)
    return [tuple(sorted(int(seed) for seed in random.choice(seeds, len(seeds)))) for _ in range(DRAWS)]


def correlation(found: Sequence[Followed]) -> float:
    """The rank correlation of critical batch and noise scale over targets (Spearman)."""
    one, other = (
        _ranks(values) for values in ([e.critical.value for e in found], [e.noise.value for e in found])
    )
    return float(np.corrcoef(one, other)[0, 1])


def apart(found: Sequence[Followed]) -> float:
    """By which factor the two differ, typically; too much at one target does not make up for too little."""
    logs = [abs(math.log(each.noise.value / each.critical.value)) for each in found]
    return math.exp(sum(logs) / len(logs))


def _ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=lambda number: values[number])
    return [order.index(number) for number in range(len(values))]


def _quantiles(value: float, draws: Iterable[float]) -> Estimate:
    known = [draw for draw in draws if not math.isnan(draw)]
    if len(set(known)) < 2:
        alone = len(known) < 2
        return Estimate(value, -math.inf if alone else value, math.inf if alone else value)
    low, high = np.quantile(known, [0.025, 0.975])
    return Estimate(value, min(value, float(low)), max(value, float(high)))


def _row(task: str, each: Followed) -> Row:
    return {
        "task": task,
        "target": _percent(each.target),
        "critical batch": _interval(each.critical),
        "noise scale": _interval(each.noise),
        "ratio": f"{each.noise.value / each.critical.value:.2f}",
    }


def _interval(found: Estimate) -> str:
    return f"{found.value:,.0f} ({found.low:,.0f} to {found.high:,.0f})"


def _plots(task: str, found: Sequence[Followed]) -> list[Plot]:
    critical = [Dot(100 * each.target, *each.critical) for each in found]
    noise = [Dot(100 * each.target, *each.noise) for each in found]
    here = Line("here, from target to target", [Dot(e.critical.value, e.noise.value) for e in found])
    early, average = (
        [Dot(float(pair[when][0]), float(pair[when][1])) for pair in published.MCCANDLISH.values()]
        for when in (0, 1)
    )
    ends = [10.0, 30_000.0]
    return [
        Plot(
            f"{task}, here",
            "target: test accuracy in %",
            "batch",
            [Line("critical batch", critical), Line("noise scale", noise)],
            log_y=True,
        ),
        Plot(
            "beside MNIST, SVHN, CIFAR-10, ImageNet as published",
            "critical batch",
            "noise scale",
            [
                here,
                Line("published, early in training", early, joined=False),
                Line("published, over training", average, joined=False),
                Line("equal", [Dot(end, end) for end in ends], marked=False),
            ],
            log_x=True,
            log_y=True,
        ),
    ]


NOISE_SCALE = Claim(
    "noise-scale",
    f"The noise of gradients predicts the critical batch: they rise together in training, and are within a "
    f"factor of {FACTOR:g}.",
    "McCandlish et al. 2018",
    judge,
    "20 min",
    [
        "Steps without momentum, as the theory has it; each batch is accumulated in two halves, so that the "
        "noise comes from gradients that are computed anyway.",
        "The curves of the same runs say when each of several targets was reached. The critical batch of a "
        "target is fitted to the steps at the best rate of each batch; the noise scale is its mean over the "
        "steps on the way, read off at the critical batch, because it depends on the batch at which it is "
        "measured.",
        "The intervals of the correlation and of the factor come from seeds drawn again and again.",
    ],
)
