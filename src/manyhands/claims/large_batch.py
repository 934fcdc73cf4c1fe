"""How far the batch can grow before accuracy is lost, with and without linear scaling and warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.claims import published
from manyhands.claims.base import Claim, Finding, Part, Row, settled_by, together, unsettled
from manyhands.claims.intervals import Level, knee, ratio
from manyhands.claims.plots import Dot, Line, Plot
from manyhands.claims.seeds import BySeed, by_seed, fewest, rates, seconds, too_few
from manyhands.core import formatting
from manyhands.core.statistics import Estimate
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results

WITH, WITHOUT_WARM_UP, WITHOUT_SCALING = "linear + warm-up", "linear, no warm-up", "no scaling"
MORE = 0.10  # of errors: a tenth more counts as lost; Goyal et al. have 0.6 % more at 32x, 5 % at 64x
GROWTH = 32  # times the smallest batch: from 256 to 8,192 in the paper
STEPS = 300  # at a batch that is judged: fewer are too few for any recipe


class Ended(NamedTuple):
    """The errors of one recipe at one batch, at the best learning rate that was tried."""

    recipe: str
    batch: int
    errors: BySeed
    records: list[RunRecord]

    @property
    def diverged(self) -> int:
        return sum(record.status == "diverged" for record in self.records)

    @property
    def steps(self) -> int:
        """The steps of the schedule, also if a run diverged before its end."""
        first = self.records[0]
        whole = (first.spec.epochs or first.epochs) * first.train_samples / self.batch
        return max(round(whole), *(record.steps for record in self.records))

    @property
    def lost_all(self) -> bool:
        return self.diverged == len(self.records)

    @property
    def fair(self) -> bool:
        """Whether it was trained for long enough; what diverges would not be saved by more steps."""
        return self.steps >= STEPS or self.lost_all

    @property
    def error(self) -> float:
        return sum(self.errors.values()) / len(self.errors)


def judge(results: Results) -> Finding:
    """Find the knee, and what leaving out warm-up and scaling costs at the largest batch that has them."""
    parts: list[Part] = []
    table: list[Row] = []
    plots: list[Plot] = []
    for task in groups.tasks(results.records):
        ended = _ended(groups.of_task(results.records, task))
        with_both = [each for each in ended if each.recipe == WITH]
        if len(with_both) < 2:
            continue
        base = with_both[0]
        took = seconds(groups.of_task(results.records, task))
        parts += [
            settled_by(part, fewest(each.records for each in ended), took)
            for part in [_knee(task, base, with_both[1:], took), *_controls(task, ended)]
        ]
        table += [_row(task, base, each) for each in ended]
        plots.append(_plot(task, base, ended))
    if not parts:
        return unsettled(f"this needs {WITH} at several batches, and the smallest of them as the reference")
    beside = (
        "Published (Goyal et al. 2017, ResNet-50 on ImageNet): 0.6 % more errors at 32x, 5 % at 64x, 17 % at "
        "128x; without warm-up 5 % more than with it at 32x."
    )
    return together(parts, table, beside, [*plots, _published()])


def _ended(records: Sequence[RunRecord]) -> list[Ended]:
    """All recipes and batches in ascending order, from synchronous runs that trained to their end."""
    found: dict[tuple[str, int], list[RunRecord]] = {}
    for record in records:
        whole = record.status != "target" and groups.attempted(record) and groups.higher_is_better(record)
        if whole and record.spec.traits.exact:
            found.setdefault((groups.recipe_variant(record), groups.batch(record)), []).append(record)
    best = [
        min((Ended(*key, by_seed(mine, _error), mine) for mine in rates(group)), key=lambda each: each.error)
        for key, group in found.items()
    ]
    return sorted(best, key=lambda each: (each.recipe != WITH, each.recipe, each.batch))


def _error(record: RunRecord) -> float:
    """The share of wrong answers; a run that diverged has learned nothing."""
    if record.status == "diverged" or record.metric is None:
        return 1.0
    return max(1.0 - record.metric, 0.5 / record.test_samples)  # never zero: its logarithm is needed


def _knee(task: str, base: Ended, larger: Sequence[Ended], took: float) -> Part:
    fair = [each for each in larger if each.fair]
    levels = [Level(each.batch / base.batch, _more(each, base)) for each in fair]
    found = knee(levels, MORE, 1.0)
    lost = next((level for level in levels if level.lost.low > MORE), None)
    text = f"{task}: with scaling and warm-up, errors stay within {formatting.percent(MORE)} of those at "
    text += f"batch {base.batch:,} up to {base.batch * found.low:,.0f} ({found.low:.0f}x)"
    if lost is not None:
        all_ = next(each for each in fair if each.batch == base.batch * lost.x)
        grow = f"grow by {formatting.percent(lost.lost.value)} at"
        how = "every run diverges at" if all_.lost_all else grow
        text += f", and {how} {base.batch * lost.x:,.0f}"
    text += f"; the knee is near {base.batch * found.value:,.0f}"
    weak = too_few(fewest([base.records, *(each.records for each in fair)]))
    at = next((level for level in levels if level.x >= GROWTH), None)
    if at is None and lost is None:
        weak = f"no batch of {GROWTH}x was trained for {STEPS} steps"
    part = Part(f"{task}: the knee", found, GROWTH, True, text, weak, unit="x")
    if at is None:
        return part
    # what decides is the batch of the claim
    seeds = fewest([base.records, *(each.records for each in fair)])
    decides = settled_by(Part("", at.lost, MORE, False, ""), seeds, took)
    return part._replace(settles=decides.settles)


def _more(one: Ended, other: Ended) -> Estimate:
    """By which share one has more errors than the other, over the seeds that they share."""
    found = ratio(one.errors, other.errors)
    return Estimate(found.value - 1, found.low - 1, found.high - 1)


def _controls(task: str, ended: Sequence[Ended]) -> list[Part]:
    """What is lost without warm-up and without scaling, relative to both, at the batch of the claim.

    That is the first one that has grown so much; at a larger one the recipe itself may break.
    """
    parts = []
    wanted = GROWTH * min(each.batch for each in ended)
    for recipe, without in ((WITHOUT_WARM_UP, "warm-up"), (WITHOUT_SCALING, "scaling")):
        tried = {each.batch: each for each in ended if each.recipe == recipe}
        full = {each.batch: each for each in ended if each.recipe == WITH}
        common = sorted(tried.keys() & full.keys())
        if not common:
            continue
        batch = next((each for each in common if each >= wanted), common[-1])
        more = _more(tried[batch], full[batch])
        text = f"without {without}, batch {batch:,} has {_percent_more(more)} errors than with it"
        if tried[batch].diverged:
            text += f" ({tried[batch].diverged} of {len(tried[batch].records)} runs diverged)"
        weak = too_few(fewest([tried[batch].records, full[batch].records]))
        if tried[batch].steps < STEPS:
            weak = f"batch {batch:,} was trained for {tried[batch].steps} steps, not {STEPS}"
        parts.append(Part(f"{task}: without {without}", more, 0.0, True, text, weak, unit="%"))
    return parts


def _percent_more(more: Estimate) -> str:
    """`25 % (18 to 32 %) more`."""
    value, low, high = (f"{100 * each:,.0f}" for each in more)
    return f"{value.lstrip('-')} % ({low} to {high} %) {'more' if more.value >= 0 else 'fewer'}"


def _row(task: str, base: Ended, each: Ended) -> Row:
    more = _more(each, base)
    learned = [record.metric for record in each.records if record.status != "diverged" and record.metric]
    return {
        "task": task,
        "recipe": each.recipe,
        "batch": each.batch,
        "steps": each.steps,
        "seeds": len(each.errors),
        "accuracy": formatting.percent(sum(learned) / len(learned), 2) if learned else "-",
        "errors relative to the smallest batch": f"{1 + more.value:.2f} ({1 + more.low:.2f} to "
        f"{1 + more.high:.2f})"
        if each is not base
        else "1",
        "diverged": f"{each.diverged} of {len(each.records)}",
    }


def _plot(task: str, base: Ended, ended: Sequence[Ended]) -> Plot:
    lines = []
    for recipe in dict.fromkeys(each.recipe for each in ended):
        dots = [_dot(each, base) for each in ended if each.recipe == recipe]
        lines.append(Line(recipe, [dot for dot in dots if dot is not None]))
    broken = [each.batch / base.batch for each in ended if each.recipe == WITH and each.lost_all]
    return Plot(
        f"{task}, here" + (f" (every run diverges at {broken[0]:.0f}x)" if broken else ""),
        "batch, relative to the smallest",
        "errors, relative to the smallest batch",
        [line for line in lines if line.dots],
        log_x=True,
        log_y=True,
        level=1 + MORE,
    )


def _dot(each: Ended, base: Ended) -> Dot | None:
    """Its point in the plot; none if every run diverged."""
    if each.lost_all:
        return None
    x = each.batch / base.batch
    if each is base:
        return Dot(x, 1.0)
    more = _more(each, base)
    return Dot(x, 1 + more.value, 1 + more.low, 1 + more.high)


def _published() -> Plot:
    base = published.GOYAL[256][0]

    def line(name: str, errors: dict[int, tuple[float, float]]) -> Line:
        return Line(
            name,
            [
                Dot(batch / 256, error / base, (error - spread) / base, (error + spread) / base)
                for batch, (error, spread) in errors.items()
            ],
        )

    return Plot(
        "ResNet-50 on ImageNet, published",
        "batch, relative to the smallest",
        "errors, relative to the smallest batch",
        [line(WITH, published.GOYAL), line(WITHOUT_WARM_UP, published.GOYAL_NO_WARM_UP)],
        log_x=True,
        log_y=True,
        level=1 + MORE,
    )


LARGE_BATCH = Claim(
    "large-batch",
    "With a learning rate that grows with the batch and a gradual warm-up, accuracy is kept while the batch "
    "grows 32x; without scaling, or without warm-up, it is not.",
    "Goyal et al. 2017: 23.60 % error at 256, 23.74 % at 8,192; without warm-up 24.84 %",
    judge,
    "50 min",
    [
        "Errors are compared on the same seed, relative to those at the smallest batch. A run that diverges "
        "counts as all wrong. The knee lies between the last batch that surely has at most 10 % more errors "
        "and the first that surely has more.",
        f"Only batches that were trained for {STEPS} steps are judged: with fewer no recipe has a chance. "
        "The paper trains its largest batch for thousands.",
    ],
)
