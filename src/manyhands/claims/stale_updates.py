"""Staleness and samples to a target: dose and response, at a fixed size of the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.crossing import crossing
from manyhands.claims.base import Claim, Finding, Part, Row, settled_by, together, unsettled
from manyhands.claims.intervals import difference, exponent, mean, ratio, slope
from manyhands.claims.plots import Dot, Line, Plot
from manyhands.claims.seeds import BySeed, by_seed, edge, fewest, geometric_mean, rates, seconds, too_few
from manyhands.core import formatting
from manyhands.core.statistics import Estimate
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results

STALE = 7.0  # updates: the claim is about many workers, and less staleness may well cost nothing
AWARE = "staleness_aware"


class Dose(NamedTuple):
    """What a staleness costs, at the best of the learning rates that were tried."""

    aware: bool  # whether rates are divided by the staleness
    workers: int
    staleness: float
    samples: BySeed  # to the target; of a run that did not reach it, what it saw: a lower bound
    reached: int
    records: list[RunRecord]
    lr: float
    edge: str = ""  # "smallest" or "largest" if the best rate is at an end of those that were tried

    @property
    def mean(self) -> float:
        return geometric_mean(self.samples)


def judge(results: Results) -> Finding:
    """Regress log samples on staleness, and see whether smaller rates for staler gradients help."""
    parts: list[Part] = []
    table: list[Row] = []
    plots: list[Plot] = []
    for task in groups.tasks(results.records):
        mine = groups.of_task(results.records, task)
        for update in _updates(mine):
            here = [record for record in mine if groups.batch(record) == update * record.spec.workers]
            plain = _doses(here, aware=False)
            if len(plain) < 2 or plain[0].staleness > 0:
                continue
            aware = _doses(here, aware=True)
            took, seeds = seconds(here), fewest(dose.records for dose in [*plain, *aware])
            found = [_response(task, plain), *_cure(here, plain)]
            parts += [settled_by(part, seeds, took) for part in found]
            table += [_row(task, plain[0], dose) for dose in [*plain, *aware]]
            plots.append(_plot(task, update, plain, aware))
    if not parts:
        return unsettled(
            "this needs an asynchronous strategy and one worker, with updates of the same size (batch / "
            "workers)"
        )
    beside = (
        "Published (Zhang et al. 2016): staleness is about the number of learners; with 30 of them plain "
        "asynchronous SGD fails on CIFAR-10, and with rates divided by the staleness it equals the "
        "synchronous one."
    )
    return together(parts, table, beside, plots)


def _updates(records: Sequence[RunRecord]) -> list[int]:
    """The sizes of updates that one worker was run with: what asynchronous workers are compared with."""
    return sorted({groups.batch(record) for record in records if _synchronous(record)})


def _synchronous(record: RunRecord) -> bool:
    return record.spec.traits.exact and record.spec.workers == 1


def _doses(records: Sequence[RunRecord], *, aware: bool) -> list[Dose]:
    """Staleness by number of workers, in ascending order; one worker alone has none."""
    found: dict[int, list[RunRecord]] = {}
    for record in records:
        free = record.spec.traits.asynchronous and bool(groups.option(record, AWARE)) == aware
        if groups.attempted(record) and (free or (_synchronous(record) and not aware)):
            found.setdefault(record.spec.workers, []).append(record)
    doses = [
        _best([_dose(aware, workers, group) for group in rates(mine)]) for workers, mine in found.items()
    ]
    return sorted(doses, key=lambda dose: dose.staleness)


def _best(tried: Sequence[Dose]) -> Dose:
    """The dose at the best of its rates, which are in ascending order."""
    best = min(tried, key=lambda dose: (-dose.reached, dose.mean))
    needed = [dose.mean if dose.reached == len(dose.records) else math.inf for dose in tried]
    return best._replace(edge=edge(needed, tried.index(best)))


def _dose(aware: bool, workers: int, records: list[RunRecord]) -> Dose:
    stale = [record.mean_staleness or 0.0 for record in records]
    return Dose(
        aware,
        workers,
        sum(stale) / len(stale),
        by_seed(records, _samples),
        sum(map(groups.succeeded, records)),
        records,
        float(records[0].recipe.get("lr") or 0.0),
    )


def _samples(record: RunRecord) -> float:
    """Samples to the target; a run that diverged would not have reached it within its schedule."""
    found = crossing(record) if groups.succeeded(record) else None
    if found is not None:
        return found.samples
    return max(float(record.samples), (record.spec.epochs or 0.0) * record.train_samples)


def _response(task: str, doses: Sequence[Dose]) -> Part:
    """The share of samples that each further update of staleness costs."""
    points = [(dose.staleness, math.log(value)) for dose in doses for value in dose.samples.values()]
    each = exponent(slope(points))
    found = Estimate(each.value - 1, each.low - 1, each.high - 1)
    none = doses[0]
    told = ", ".join(
        f"{_times(ratio(dose.samples, none.samples), dose)} at {dose.staleness:.2g}" for dose in doses[1:]
    )
    text = (
        f"{task}: relative to a staleness of 0, the samples to {_target(none)} are {told} (each at its best "
        f"rate): {formatting.percent(found.value, 1)} ({formatting.percent(found.low, 1)} to "
        f"{formatting.percent(found.high, 1)}) more per update of staleness"
    )
    weak = too_few(fewest(dose.records for dose in doses))
    if doses[-1].staleness < STALE:
        weak = f"the staleness is at most {doses[-1].staleness:.2g}, not {STALE:g}"
    name = f"{task}: samples per update of staleness"
    return Part(name, found, 0.0, True, text, weak, _untuned(doses[1:]), unit="%")


def _untuned(stale: Sequence[Dose]) -> str:
    """Why a staleness may cost less than it seems: its best rate may be one that was not tried.

    The same about the reference would make the cost larger. Where no rate arrives, no edge is known.
    """
    edges = [dose for dose in stale if dose.edge and dose.reached]
    if not edges:
        return ""
    return f"at a staleness of {edges[-1].staleness:.2g} the best rate is the {edges[-1].edge} that was tried"


def _times(found: Estimate, dose: Dose) -> str:
    """`2.4x (1.9x to 3.1x)`, or `more than 4x` where most runs did not arrive."""
    if 2 * dose.reached <= len(dose.records):
        return f"more than {found.value:.2g}x"
    return f"{found.value:.2f}x ({found.low:.2f}x to {found.high:.2f}x)"


def _target(dose: Dose) -> str:
    first = dose.records[0]
    return formatting.threshold(first.target, first.metric_name)


def _cure(records: Sequence[RunRecord], plain: Sequence[Dose]) -> list[Part]:
    """At the rate that is best without staleness: the metric with and without division by the staleness."""
    best = plain[0].lr
    sides: dict[int, dict[bool, list[RunRecord]]] = {}
    for record in records:
        if record.spec.traits.asynchronous and float(record.recipe.get("lr") or 0.0) == best:
            side = sides.setdefault(record.spec.workers, {})
            side.setdefault(bool(groups.option(record, AWARE)), []).append(record)
    both = {workers: found for workers, found in sides.items() if len(found) == 2}
    if not both:
        return []
    workers = max(both)
    aware, without = (by_seed(both[workers][which], _learned) for which in (True, False))
    found = difference(aware, without)
    with_it, alone = (sum(each.values()) / len(each) for each in (aware, without))
    diverged = sum(record.status == "diverged" for record in both[workers][False])
    text = (
        f"at the rate that is best without staleness ({best:g}), {workers} workers reach "
        f"{formatting.percent(with_it, 1)} with rates divided by the staleness and "
        f"{formatting.percent(alone, 1)} without"
    )
    if diverged:
        text += f" ({diverged} of {len(both[workers][False])} runs diverged)"
    weak = too_few(fewest(both[workers].values()))
    return [Part("rates divided by the staleness help", found, 0.0, True, text, weak, unit="points")]


def _learned(record: RunRecord) -> float:
    """The best accuracy of a run, also of one that diverged later."""
    return record.best_metric or 0.0


def _row(task: str, none: Dose, dose: Dose) -> Row:
    found = ratio(dose.samples, none.samples)
    return {
        "task": task,
        "rates": "divided by the staleness" if dose.aware else "plain",
        "workers": dose.workers,
        "staleness": f"{dose.staleness:.1f}",
        "best rate": f"{dose.lr:g}" + (f" (the {dose.edge} tried)" if dose.edge else ""),
        "samples to the target": f"{dose.mean:,.0f}" if dose.reached else f"more than {dose.mean:,.0f}",
        "relative to none": "1" if dose is none else _times(found, dose),
        "reached": f"{dose.reached} of {len(dose.records)}",
    }


def _plot(task: str, update: int, plain: Sequence[Dose], aware: Sequence[Dose]) -> Plot:
    def line(name: str, doses: Sequence[Dose]) -> Line:
        return Line(name, [_dot(dose, plain[0]) for dose in doses])

    lines = [line("plain", plain), line("rates divided by the staleness", aware)]
    return Plot(
        f"{task}, here (updates of {update} samples)",
        "staleness, in updates",
        f"samples to {_target(plain[0])}, relative to none",
        [each for each in lines if each.dots],
        log_y=True,
        level=1.0,
    )


def _dot(dose: Dose, none: Dose) -> Dot:
    if dose is none:
        spread = exponent(mean([math.log(value / none.mean) for value in none.samples.values()]))
        return Dot(dose.staleness, 1.0, *_ends(spread))
    found = ratio(dose.samples, none.samples)
    return Dot(dose.staleness, found.value, *_ends(found))


def _ends(found: Estimate) -> tuple[float | None, float | None]:
    known = found.low > 0 and math.isfinite(found.high)
    return (found.low, found.high) if known else (None, None)


ASYNCHRONY = Claim(
    "asynchrony",
    "Workers that do not wait for each other use gradients of older parameters, and pay for it with more "
    "samples to the target, the more the staler they are; rates divided by the staleness help.",
    "Recht et al. 2011 (Hogwild), Dean et al. 2012, Zhang et al. 2016 (staleness), Chen et al. 2016",
    judge,
    "30 min",
    [
        "Every update is made of 64 samples whatever the number of workers, so that staleness is the only "
        "thing that grows; the reference is one worker with batch 64. Workers outnumber the cores: this is "
        "about samples, and seconds do not count.",
        "For each staleness the best of several rates counts. A run that does not reach the target counts "
        "with the samples that it saw, which is a lower bound.",
    ],
)
