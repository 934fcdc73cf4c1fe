"""Whether the noise of gradients predicts the critical batch: both for several targets of the same runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from manyhands.analysis import groups
from manyhands.analysis.fit import FEWEST, Observation, estimate, fit
from manyhands.claims import published
from manyhands.claims.base import Claim, Finding, Part, Row, settled_by, together, unsettled
from manyhands.claims.critical_batch import Tuned, tuned
from manyhands.claims.plots import Dot, Line, Plot
from manyhands.claims.seeds import by_seed, fewest, seconds, too_few
from manyhands.core import formatting
from manyhands.core.statistics import Estimate
from manyhands.records.record import Evaluation, RunRecord
from manyhands.records.study_results import Results

TARGETS = (0.90, 0.92, 0.94, 0.95, 0.96, 0.965, 0.97, 0.975, 0.98)
ALIKE = 0.8  # rank correlation from which two quantities rise together
FACTOR = 5.0  # McCandlish et al. find a factor of 4.5 on MNIST
FEWEST_TARGETS = 4
RISE = 2.0  # the critical batch must grow so many times, or there is nothing to follow
WINDOW = 3  # evaluations: one alone is too noisy for a ratio
BATCHES = 2  # the noise is taken from the batches nearest to the critical ones: it depends on the temperature
DRAWS = 200  # of seeds, if there are too many combinations
SEED = 20181214


class Followed(NamedTuple):
    """The critical batch for one target, and the noise scale on the way there."""

    target: float
    critical: Estimate
    noise: float
    points: list[Tuned]


def judge(results: Results) -> Finding:
    """Correlate the two over the targets, and say how far they are apart."""
    parts: list[Part] = []
    table: list[Row] = []
    plots: list[Plot] = []
    for task in groups.tasks(results.records):
        mine = [
            record for record in groups.of_task(results.records, task) if _measured(record)
        ]  # the gradients of a run that diverges are not representative
        found = followed(mine)
        if len(found) < 2:
            continue
        seeds = fewest(point.records for each in found for point in each.points)
        decided = _parts(task, found)
        parts += [settled_by(part, seeds, seconds(mine)) for part in decided]
        table += [_row(task, each) for each in found]
        plots += _plots(task, found)
    if not parts:
        return unsettled("this needs runs with noise_scale to a target, at four batches or more")
    beside = "Published (McCandlish et al. 2018, MNIST): noise scale 900 and critical batch 200, 4.5x apart."
    return together(parts, table, beside, plots)


def _measured(record: RunRecord) -> bool:
    return record.status != "diverged" and any(point.noise for point in record.curve)


def followed(records: Sequence[RunRecord], seeds: Sequence[int] | None = None) -> list[Followed]:
    """Both quantities for every target that these runs reached at enough batches.

    `seeds` may contain a seed several times, for the bootstrap; then intervals are not computed.
    """
    curves = []
    for target in TARGETS:
        points = tuned([aimed(record, target) for record in records])
        if len(points) <= FEWEST:
            continue
        seen = tuple(_observation(point, seeds) for point in points)
        value = fit(seen).b_crit
        critical = estimate(seen).b_crit if seeds is None else Estimate(value, value, value)
        if points[0].batch <= critical.value <= points[-1].batch:  # otherwise no run is near it
            curves.append((target, critical, points))
    if not curves:
        return []
    center = math.exp(sum(math.log(critical.value) for _, critical, _ in curves) / len(curves))
    near = sorted({point.batch for point in curves[0][2]}, key=lambda batch: abs(math.log(batch / center)))
    found = []
    for target, critical, points in curves:
        chosen = [point for point in points if point.batch in near[:BATCHES]]
        scales = [
            value for point in chosen for value in _drawn(by_seed(point.records, mean_noise), seeds) if value
        ]
        if scales:
            noise = math.exp(sum(map(math.log, scales)) / len(scales))
            found.append(Followed(target, critical, noise, points))
    return found


def aimed(record: RunRecord, target: float) -> RunRecord:
    """The same run as if this had been its target."""
    at = next((point for point in record.curve if _reaches(point, target)), None)
    return record.model_copy(
        update={
            "target": target,
            "target_samples": at.samples if at else None,
            "target_steps": at.step if at else None,
            "target_seconds": at.seconds if at else None,
        }
    )


def _reaches(point: Evaluation, target: float) -> bool:
    return point.metric is not None and point.metric >= target


def mean_noise(record: RunRecord) -> float | None:
    """The noise scale up to the target: the mean over steps of the ratio in windows of a few evaluations.

    The theory has S = sum over steps of (1 + noise / B). A ratio of sums over the whole run would weight the
    first steps, where gradients are large.
    """
    until = record.target_samples
    way = [point for point in record.curve if until is None or point.samples <= until]
    total, steps, last = 0.0, 0, 0
    for window in (way[at : at + WINDOW] for at in range(0, len(way), WINDOW)):
        made = window[-1].step - last
        last = window[-1].step
        gradient = sum(point.noise[0] for point in window if point.noise)
        spread = sum(point.noise[1] for point in window if point.noise)
        if gradient > 0 and spread > 0:  # with too few steps an estimate may be negative
            total, steps = total + made * spread / gradient, steps + made
    return total / steps if steps else None


def _observation(point: Tuned, seeds: Sequence[int] | None) -> Observation:
    logs = [math.log(value) for value in _drawn(point.steps, seeds)]
    center = sum(logs) / len(logs)
    spread = math.sqrt(sum((each - center) ** 2 for each in logs) / max(1, len(logs) - 1) / len(logs))
    return Observation(point.batch, math.exp(center), spread)


def _drawn(values: dict[int, float], seeds: Sequence[int] | None) -> list[float]:
    """The values of these seeds; all of them if none of these is there."""
    drawn = [values[seed] for seed in seeds or () if seed in values]
    return drawn or list(values.values())


def _parts(task: str, found: Sequence[Followed]) -> list[Part]:
    records = list({id(r): r for each in found for point in each.points for r in point.records}.values())
    draws = [again for seeds in _combinations(records) if len(again := followed(records, seeds)) > 1]
    first, last = found[0], found[-1]
    weak = too_few(fewest(point.records for each in found for point in each.points))
    if len(found) < FEWEST_TARGETS:
        weak = f"{formatting.plural(len(found), 'target')} could be followed, not {FEWEST_TARGETS}"
    elif last.critical.value < RISE * first.critical.value:
        weak = f"the critical batch grows only {last.critical.value / first.critical.value:.1f}x between targets"
    together_ = _quantiles(correlation(found), map(correlation, draws))
    text = (
        f"{task}: from {formatting.percent(first.target)} to {formatting.threshold(last.target, 'accuracy')}, "
        f"the critical batch goes from {first.critical.value:,.0f} to {last.critical.value:,.0f} and the noise "
        f"scale from {first.noise:,.0f} to {last.noise:,.0f}, with a rank correlation of "
        f"{together_.value:.2f} ({together_.low:.2f} to {together_.high:.2f}) over "
        f"{formatting.plural(len(found), 'target')}"
    )
    doubt = weak if len(found) < FEWEST_TARGETS else ""  # two targets always correlate
    rise = Part(f"{task}: they rise together", together_, ALIKE, True, text, weak, doubt)
    between = apart(found)
    drawn = _quantiles(between, map(apart, draws))
    # the fit is less sure than the seeds say: the curve is not exactly the model's
    width = sum(math.log(each.critical.high / each.critical.low) / 2 for each in found) / len(found)
    down = math.hypot(math.log(between / drawn.low), width)
    up = math.hypot(math.log(drawn.high / between), width)
    factor = Estimate(between, max(1.0, between * math.exp(-down)), between * math.exp(up))
    text = f"they are {between:.1f}x ({factor.low:.1f}x to {factor.high:.1f}x) apart"
    return [rise, Part(f"{task}: how far apart", factor, FACTOR, False, text, weak, unit="x")]


def _combinations(records: Iterable[RunRecord]) -> list[tuple[int, ...]]:
    """Draws of as many seeds as there are, with replacement: all of them if they are few."""
    seeds = sorted({record.spec.seed for record in records})
    if len(seeds) ** len(seeds) <= DRAWS:
        return [tuple(sorted(draw)) for draw in itertools.product(seeds, repeat=len(seeds))]
    random = np.random.default_rng(SEED)
    return [tuple(int(seed) for seed in random.choice(seeds, len(seeds))) for _ in range(DRAWS)]


def correlation(found: Sequence[Followed]) -> float:
    """The rank correlation of critical batch and noise scale over targets (Spearman)."""
    one, other = (_ranks(values) for values in ([e.critical.value for e in found], [e.noise for e in found]))
    return float(np.corrcoef(one, other)[0, 1])


def apart(found: Sequence[Followed]) -> float:
    """By which factor the two differ, over the targets together; at least 1."""
    logs = [math.log(each.noise / each.critical.value) for each in found]
    return math.exp(abs(sum(logs) / len(logs)))


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
        "target": formatting.threshold(each.target, "accuracy"),
        "critical batch": f"{each.critical.value:,.0f} ({each.critical.low:,.0f} to {each.critical.high:,.0f})",
        "noise scale": round(each.noise),
        "ratio": f"{each.noise / each.critical.value:.2f}",
        "batches": len(each.points),
    }


def _plots(task: str, found: Sequence[Followed]) -> list[Plot]:
    critical = [Dot(each.target, each.critical.value, each.critical.low, each.critical.high) for each in found]
    noise = [Dot(each.target, each.noise) for each in found]
    here = Line("here, from target to target", [Dot(each.critical.value, each.noise) for each in found])
    early, average = (
        [Dot(float(pair[when][0]), float(pair[when][1])) for pair in published.MCCANDLISH.values()]
        for when in (0, 1)
    )
    ends = [10.0, 30_000.0]
    return [
        Plot(
            f"{task}, here",
            "target: test accuracy",
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
                Line("published, early in training", early),
                Line("published, over training", average),
                Line("equal", [Dot(end, end) for end in ends]),
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
        "Steps without momentum, as the theory has it; each batch is accumulated in two halves, so that the noise "
        "comes from gradients that are computed anyway.",
        "The curves of the same runs say when each of several targets was reached. The critical batch of a target "
        "is fitted to the steps at the best rate of each batch; the noise scale is its mean over the steps on the "
        "way, of the runs with the two batches that are nearest to the critical ones.",
    ],
)
