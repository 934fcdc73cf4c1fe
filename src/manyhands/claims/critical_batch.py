"""Steps to a target by batch: halved at first, then less and less, then not at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.crossing import crossing
from manyhands.analysis.regimes import regimes
from manyhands.claims import published
from manyhands.claims.base import Claim, Finding, Part, Row, settled_by, together, unsettled
from manyhands.claims.intervals import mean
from manyhands.claims.plots import Dot, Line, Plot
from manyhands.claims.seeds import BySeed, by_seed, edge, fewest, geometric_mean, rates, seconds, too_few
from manyhands.core import formatting
from manyhands.core.statistics import Estimate, student_t
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results

STEEP, FLAT = 0.8, 0.35  # slopes of log steps over log batch: 1 halves the steps, 0 changes nothing
RANGE = 256  # the largest batch must be this many times the smallest to show all three regimes
FEWEST = 4  # batches


class Tuned(NamedTuple):
    """Steps to the target at one batch, at the best of the learning rates that were tried."""

    batch: int
    steps: BySeed
    records: list[RunRecord]
    lr: float
    edge: str  # "smallest", "largest" or "only" if the best rate is at an end of those that were tried

    @property
    def mean(self) -> float:
        return geometric_mean(self.steps)


def judge(results: Results) -> Finding:
    """Compare the slopes at both ends of the curve of each task."""
    parts: list[Part] = []
    table: list[Row] = []
    plots: list[Plot] = []
    for task in groups.tasks(results.records):
        mine = groups.of_task(results.records, task)
        points = tuned(mine)
        if len(points) < FEWEST:
            continue
        seeds = fewest(each.records for each in points)
        ends = (_steep(task, points), _flat(task, points))
        parts += [settled_by(part, seeds, seconds(mine)) for part in ends]
        table += [_row(task, each) for each in points]
        plots.append(_plot(f"{task}, here", {each.batch: each for each in points}))
    if not parts:
        return unsettled(f"this needs steps to a target at {FEWEST} batches or more")
    critical = [fit for fit in regimes(results.records) if fit.b_crit is not None]
    told = [
        f"The critical batch of {fit.task} is {fit.b_crit.value:,.0f} ({fit.b_crit.low:,.0f} to "
        f"{fit.b_crit.high:,.0f})."
        for fit in critical
        if fit.b_crit is not None
    ]
    return together(parts, table, " ".join([*told, _beside()]), [*plots, _published()])


def tuned(records: Sequence[RunRecord]) -> list[Tuned]:
    """Every batch at which some rate reached the target with all of its seeds, in ascending order."""
    sizes: dict[int, list[RunRecord]] = {}
    for record in records:
        if record.spec.traits.exact and groups.attempted(record):
            sizes.setdefault(groups.batch(record), []).append(record)
    return [found for size in sorted(sizes) if (found := _best(size, sizes[size])) is not None]


def _best(batch: int, records: Sequence[RunRecord]) -> Tuned | None:
    tried = rates(records)
    needed = [_needed(group) for group in tried]
    number = min(range(len(tried)), key=lambda each: needed[each])
    if math.isinf(needed[number]):
        return None
    best = tried[number]
    lr = float(best[0].recipe.get("lr") or 0.0)
    return Tuned(batch, by_seed(best, _steps), best, lr, edge(needed, number))


def _needed(group: Sequence[RunRecord]) -> float:
    """The geometric mean of the steps; infinite if a seed did not arrive."""
    steps = by_seed(group, _steps)
    if len(steps) < len({record.spec.seed for record in group}):
        return math.inf
    return geometric_mean(steps)


def _steps(record: RunRecord) -> float | None:
    found = crossing(record) if groups.succeeded(record) else None
    return found.steps if found is not None else None


def slope(small: Tuned, large: Tuned, points: Sequence[Tuned]) -> Estimate:
    """By which power of the batch the steps fall.

    The seeds of two batches are few, so the spread between seeds is taken from all batches together.
    """
    apart = math.log(large.batch / small.batch)
    value = math.log(small.mean / large.mean) / apart
    freedom = sum(len(each.steps) - 1 for each in points)
    if freedom == 0:
        return Estimate(value, -math.inf, math.inf)
    squares = sum(math.log(steps / each.mean) ** 2 for each in points for steps in each.steps.values())
    both = 1 / len(small.steps) + 1 / len(large.steps)
    reach = student_t(freedom) * math.sqrt(squares / freedom * both) / apart
    return Estimate(value, value - reach, value + reach)


def _steep(task: str, points: Sequence[Tuned]) -> Part:
    small, next_ = points[0], points[1]
    text = f"{task}: from batch {small.batch} to {next_.batch} a doubling saves "
    found = slope(small, next_, points)
    text += f"{_saved(found)} of the steps (half would be perfect)"
    weak = _weak(points)
    return Part(f"{task}: small batches", found, STEEP, True, text, weak, _untuned(small))


def _flat(task: str, points: Sequence[Tuned]) -> Part:
    before, last = points[-2], points[-1]
    text = f"from {before.batch:,} to {last.batch:,} it saves "
    found = slope(before, last, points)
    text += _saved(found)
    weak = _weak(points)
    return Part(f"{task}: large batches", found, FLAT, False, text, weak, _untuned(last))


def _untuned(point: Tuned) -> str:
    """Why the steps at an end may be too many, so that the curve seems to bend there."""
    return f"at batch {point.batch:,} the best rate is the {point.edge} that was tried" if point.edge else ""


def _weak(points: Sequence[Tuned]) -> str:
    if points[-1].batch < RANGE * points[0].batch:
        return f"the batches grow {points[-1].batch / points[0].batch:.0f}x, not {RANGE}x"
    return too_few(fewest(each.records for each in points))


def _saved(found: Estimate) -> str:
    """The share of steps that doubling the batch saves: `45 % (43 to 48 %)`."""
    value, low, high = (100 * (1 - 2.0**-each) if math.isfinite(each) else each for each in found)
    known = f" ({low:.0f} to {high:.0f} %)" if math.isfinite(low) and math.isfinite(high) else ""
    return f"{value:.0f} %{known}"


def _row(task: str, each: Tuned) -> Row:
    return {
        "task": task,
        "batch": each.batch,
        "steps": round(each.mean),
        "samples": round(each.mean * each.batch),
        "seeds": len(each.steps),
        "best rate": f"{each.lr:g}" + (f" (the {each.edge} tried)" if each.edge else ""),
    }


def _plot(title: str, points: dict[int, Tuned]) -> Plot:
    dots = []
    for batch, each in points.items():
        logs = mean([math.log(value) for value in each.steps.values()])
        low, high = (math.exp(end) if math.isfinite(end) else None for end in logs[1:])
        dots.append(Dot(batch, each.mean, low, high))
    first = dots[0]
    return Plot(
        title,
        "batch",
        "steps to the target",
        [Line("measured", dots), _halving(float(first.x), first.y, max(points))],
        log_x=True,
        log_y=True,
    )


def _halving(batch: float, steps: float, until: float) -> Line:
    ends = [Dot(batch, steps), Dot(until, steps * batch / until)]
    return Line("each doubling halves", ends, marked=False)


def _published() -> Plot:
    points = published.SHALLUE
    return Plot(
        "simple CNN on MNIST to 99 %, published",
        "batch",
        "steps to the target",
        [
            Line("measured", [Dot(batch, steps) for batch, steps in points.items()]),
            _halving(1, points[1], 2048),
        ],
        log_x=True,
        log_y=True,
    )


def _beside() -> str:
    steps = published.SHALLUE
    steep = math.log(steps[1] / steps[32]) / math.log(32)
    flat = math.log(steps[2048] / steps[55000]) / math.log(55000 / 2048)
    return (
        "Published (Shallue et al. 2018, simple CNN on MNIST to 99 %): a doubling saves "
        f"{formatting.percent(1 - 2**-steep)} of the steps up to batch 32 and "
        f"{formatting.percent(1 - 2**-flat)} beyond 2,048."
    )


CRITICAL_BATCH = Claim(
    "critical-batch",
    "Doubling the batch halves the steps to a target up to a critical batch, then returns diminish, and in "
    "the end a larger batch saves nothing.",
    "Shallue et al. 2018",
    judge,
    "20 min",
    [
        "For each batch the best of several learning rates counts, as in the paper; a rate counts if all of "
        "its seeds reach the target. The moment of reaching it is interpolated between evaluations.",
        f"A doubling that saves at least {formatting.percent(1 - 2**-STEEP)} of the steps counts as halving "
        f"them, one that saves at most {formatting.percent(1 - 2**-FLAT)} as saving nothing to speak of.",
        "The target is lower than the published 99 %, so there are fewer steps: compare the shape.",
        "The runs are those of noise-scale: one study tests both claims.",
    ],
    study="noise-scale",
)
