"""The gradient noise scale of McCandlish et al., and how well it predicts the critical batch.

The noise scale depends on the batch at which it is measured: a larger learning rate per sample keeps training
where gradients are noisier (their "temperature"). So each batch has its own value, from the runs at its best
learning rate, and the one to compare is that at the critical batch of the same recipe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.batch_points import recipe_family
from manyhands.analysis.crossing import crossing, retargeted
from manyhands.analysis.fit import NORMAL
from manyhands.analysis.noise_windows import FEWEST, RunScale, measured, run_scale
from manyhands.analysis.regimes import Regimes, regimes
from manyhands.core.statistics import Estimate, student_t
from manyhands.records.record import RunRecord

ALIKE = 1.05  # sample counts up to this factor apart are combined into one point
SEEDS = 0.15  # the usual relative spread between seeds, as far as is known before there are several
SEEDS_FREEDOM = 4  # how many degrees of freedom that assumption is worth beside those of seeds


class NoisePoint(NamedTuple):
    """The noise scale after some number of samples."""

    samples: int
    scale: float


class BatchScale(NamedTuple):
    """The noise scale that was measured at one batch, at its best learning rate."""

    batch: int
    scale: Estimate
    runs: int


class NoiseScale(NamedTuple):
    """B_simple of a task at its critical batch, next to the B_crit that was fitted to steps to the target."""

    task: str
    scale: Estimate | None
    runs: int
    by_samples: list[NoisePoint]
    critical: Estimate | None
    ratio: float | None  # B_simple / B_crit
    label: str = ""  # the recipe, if there are several
    batches: tuple[BatchScale, ...] = ()
    problem: str | None = None  # why there is no scale


class TargetScale(NamedTuple):
    """The critical batch for one target, and the noise scale up to there."""

    target: float
    critical: Estimate | None
    noise: Estimate | None


def noise_scales(records: Iterable[RunRecord]) -> list[NoiseScale]:
    """Return one row per task and recipe with at least one run that measured its gradient noise."""
    families: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        # the gradients of a run that diverges are not representative
        if record.status != "diverged":
            families.setdefault((groups.task_name(record), recipe_family(record)), []).append(record)
    found = []
    for task, family in sorted(families):
        group = families[task, family]
        metered = [record for record in group if record.noise is not None and record.noise.steps > 0]
        if metered:
            several = sum(name == task for name, _ in families) > 1
            label = groups.recipe_variant(group[0]) if several else ""
            found.append(_noise_scale(task, label, group, metered))
    return found


def by_target(records: Iterable[RunRecord], task: str, targets: Sequence[float]) -> list[TargetScale]:
    """The critical batch and the noise scale for several targets of the same runs, from their curves.

    If the task was run with several recipes, the one with the most batches counts.
    """
    families: dict[str, list[RunRecord]] = {}
    for record in groups.of_task(records, task):
        families.setdefault(recipe_family(record), []).append(record)
    if not families:
        return [TargetScale(target, None, None) for target in targets]
    family = max(sorted(families), key=lambda each: len({groups.batch(run) for run in families[each]}))
    found = []
    for target in targets:
        group = [retargeted(record, target) for record in families[family]]
        fit = next((fit for fit in regimes(group) if fit.b_crit is not None), None)
        critical = fit.b_crit if fit else None
        metered = [record for record in group if record.noise is not None and record.status != "diverged"]
        noise = _at(_batch_scales(_best(metered, fit)), critical) if fit else None
        found.append(TargetScale(target, critical, noise))
    return found


def _noise_scale(
    task: str, label: str, group: Sequence[RunRecord], metered: Sequence[RunRecord]
) -> NoiseScale:
    fits = regimes(group)
    fit = next((fit for fit in fits if fit.b_crit is not None), fits[0] if fits else None)
    used = _best(metered, fit)
    batches = _batch_scales(used)
    critical = fit.b_crit if fit else None
    scale = _at(batches, critical)
    return NoiseScale(
        task,
        scale,
        sum(each.runs for each in batches),
        _by_samples(used),
        critical,
        scale.value / critical.value if scale and critical else None,
        label=label,
        batches=tuple(batches),
        problem=None if scale else _problem(used),
    )


def _best(metered: Sequence[RunRecord], fit: Regimes | None) -> list[RunRecord]:
    """The runs at the best learning rate of their batch; all, where no rate reached the target."""
    if fit is None:
        return list(metered)
    best = {point.batch: point.lr for point in fit.points if point.steps is not None}
    chosen = [
        record
        for record in metered
        if (batch := groups.batch(record)) in best and record.recipe.get("lr") == best[batch]
    ]
    return chosen or list(metered)


def _batch_scales(records: Sequence[RunRecord]) -> list[BatchScale]:
    """The scale at each batch, with an interval from windows and seeds.

    The spread between seeds is taken to be the same at each batch, and combined with what is usual.
    """
    found: dict[int, list[RunScale]] = {}
    for record in sorted(records, key=lambda record: record.run):  # rounding depends on the order
        end = crossing(record)
        scale = run_scale(measured(record, end.samples if end else None))
        if scale is not None:
            found.setdefault(groups.batch(record), []).append(scale)
    squares, freedom = SEEDS_FREEDOM * SEEDS**2, SEEDS_FREEDOM
    for runs in found.values():
        logs = [math.log(run.scale) for run in runs]
        center = math.fsum(logs) / len(logs)
        squares += math.fsum((each - center) ** 2 for each in logs)
        freedom += len(logs) - 1
    seeds = squares / freedom
    return [
        BatchScale(batch, _mean(found[batch], seeds, freedom), len(found[batch])) for batch in sorted(found)
    ]


def _mean(runs: Sequence[RunScale], seeds: float, freedom: int) -> Estimate:
    n = len(runs)
    center = math.fsum(math.log(run.scale) for run in runs) / n
    # what seeds show includes the errors of their windows, what was assumed before does not
    windows = SEEDS_FREEDOM / freedom * math.fsum(run.error**2 for run in runs) / n
    reach = math.sqrt((student_t(freedom) ** 2 * seeds + NORMAL**2 * windows) / n)
    return Estimate(math.exp(center), math.exp(center - reach), math.exp(center + reach))


def _at(batches: Sequence[BatchScale], critical: Estimate | None) -> Estimate | None:
    """The scale at the critical batch, between the two batches around it; without one, in the middle."""
    if not batches:
        return None
    least, most = batches[0].batch, batches[-1].batch
    middle = math.log(critical.value) if critical else math.log(least * most) / 2
    value, reach = _between(batches, middle)
    if critical:  # where to read it off is not known exactly, either
        ends = [_between(batches, math.log(end))[0] for end in (critical.low, critical.high)]
        reach = math.hypot(reach, abs(ends[1] - ends[0]) / 2)
    elif len(batches) > 1:
        ends = [math.log(each.scale.value) for each in batches]
        reach = math.hypot(reach, (max(ends) - min(ends)) / 2)
    return Estimate(math.exp(value), math.exp(value - reach), math.exp(value + reach))


def _between(batches: Sequence[BatchScale], middle: float) -> tuple[float, float]:
    """The log scale at this log batch and the half width of its interval, on the line between two batches."""
    below = [each for each in batches if math.log(each.batch) <= middle]
    above = [each for each in batches if math.log(each.batch) > middle]
    if not below or not above:
        return _log(below[-1] if below else above[0])
    first, last = below[-1], above[0]
    share = (middle - math.log(first.batch)) / math.log(last.batch / first.batch)
    (left, left_reach), (right, right_reach) = _log(first), _log(last)
    reach = math.hypot((1 - share) * left_reach, share * right_reach)
    return (1 - share) * left + share * right, reach


def _log(each: BatchScale) -> tuple[float, float]:
    return math.log(each.scale.value), math.log(each.scale.high / each.scale.value)


def _problem(records: Sequence[RunRecord]) -> str:
    if max((len(measured(record)) for record in records), default=0) < FEWEST:
        return f"the noise must be measured over training, but no run has {FEWEST} evaluations"
    return "the gradients were too noisy for so few steps: a larger batch shows more"


def _by_samples(records: Sequence[RunRecord]) -> list[NoisePoint]:
    """Return the noise scale over training: at each point, the mean over runs after about as many samples."""
    points = [
        (window.samples, window.steps, window.ratio)
        for record in records
        if (scale := run_scale(measured(record))) is not None
        for window in scale.windows
    ]
    sums: dict[int, tuple[int, float]] = {}
    last = 0
    for samples, _, ratio in sorted(points):
        # runs with different batches evaluate after slightly different numbers of samples
        last = last if last and samples <= ALIKE * last else samples
        count, total = sums.get(last, (0, 0.0))
        sums[last] = count + 1, total + math.log(ratio)
    return [NoisePoint(samples, math.exp(total / count)) for samples, (count, total) in sorted(sums.items())]
