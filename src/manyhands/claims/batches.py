"""Claims about the batch: how the learning rate grows with it, and where a larger one stops helping."""

from __future__ import annotations

import math

from manyhands.analysis import groups
from manyhands.analysis.generalization import Generalization, generalization
from manyhands.analysis.noise_scale import noise_scales
from manyhands.analysis.regimes import Regimes, regimes
from manyhands.claims.base import Claim, Finding, Row, together, unsettled
from manyhands.core import formatting
from manyhands.records.study_results import Results

WITH, WITHOUT_WARM_UP, WITHOUT_SCALING = "linear + warm-up", "linear, no warm-up", "no scaling"
LOST = 0.005  # of accuracy; Goyal et al. count 0.0014 as no loss, on a much larger test set
GROWTH = 32  # the largest batch must be this many times the smallest
STEEP, FLAT = 0.8, 0.35  # slopes of log steps over log batch: 1 halves the steps, 0 changes nothing
FACTOR = 5.0  # McCandlish et al. find a factor of 4.5 on MNIST
# Shallue et al. 2018, figure 1, digitized (+-0.065 in log2): steps to 99 % with a simple CNN on MNIST
PUBLISHED = {
    1: 65536, 2: 32043, 8: 9161, 32: 2395, 128: 685, 512: 306, 2048: 179, 8192: 196, 32768: 164, 55000: 137,
}  # fmt: skip


def _large_batch(results: Results) -> Finding:
    parts: list[tuple[bool, str]] = []
    table: list[Row] = []
    found = generalization(results.records)
    for task in groups.tasks(results.records):
        rows = [row for row in found if row.task == task and row.higher_is_better]  # accuracy, not a loss
        batches = sorted({row.batch for row in rows})
        if len(batches) < 2 or batches[-1] < GROWTH * batches[0]:
            continue
        table += [_accuracy_row(row) for row in rows]
        small = [row for row in rows if row.batch == batches[0]]
        base = max(row.metric.median for row in small)
        largest = {row.recipe: row for row in rows if row.batch == batches[-1]}
        for recipe, keeps in ((WITH, True), (WITHOUT_WARM_UP, False), (WITHOUT_SCALING, False)):
            if recipe not in largest:
                continue
            row = largest[recipe]
            lost = base - row.metric.median
            kept = lost <= LOST and not row.diverged
            parts.append((kept is keeps, f"{_prefix(task, parts)}{_sentence(row, lost, kept)}"))
    if not parts:
        return unsettled(f"this needs batches that grow {GROWTH}x, with and without scaling and warm-up")
    return together(parts, table)


def _prefix(task: str, parts: list[tuple[bool, str]]) -> str:
    """The name of the task, unless an earlier part has it."""
    return "" if any(text.startswith(f"{task}: ") for _, text in parts) else f"{task}: "


def _sentence(row: Generalization, lost: float, kept: bool) -> str:
    what = f"batch {row.batch:,} with {row.recipe}"
    if row.diverged == row.of:
        return f"{what} diverges"
    diverged = f" and diverges in {row.diverged} of {row.of} runs" if row.diverged else ""
    level = formatting.percent(row.metric.median, 2)
    points = f"{abs(100 * lost):.1f} points {'less' if lost > 0 else 'more'} than the smallest batch"
    return f"{what} {'keeps' if kept else 'loses'} accuracy: {level}, {points}{diverged}"


def _accuracy_row(row: Generalization) -> Row:
    return {
        "task": row.task,
        "recipe": row.recipe,
        "batch": row.batch,
        "accuracy": formatting.percent(row.metric.median, 2) if row.diverged < row.of else "-",
        "diverged": f"{row.diverged} of {row.of}",
    }


def _critical_batch(results: Results) -> Finding:
    parts: list[tuple[bool, str]] = []
    table: list[Row] = []
    for fit in regimes(results.records):
        known = [(point.batch, point.steps) for point in fit.points if point.steps is not None]
        if fit.b_crit is None or len(known) < 4:
            continue
        steep, flat = _slope(*known[0], *known[1]), _slope(*known[-2], *known[-1])
        table += [_steps_row(fit, batch, steps) for batch, steps in known]
        parts.append(
            (
                steep >= STEEP and flat <= FLAT,
                f"{fit.task}: from batch {known[0][0]} to {known[1][0]} a doubling saves "
                f"{_saved(steep)} of the steps (half would be perfect), from {known[-2][0]:,} "
                f"to {known[-1][0]:,} {_saved(flat)}; the critical batch is "
                f"{fit.b_crit.value:,.0f} ({fit.b_crit.low:,.0f} to {fit.b_crit.high:,.0f})",
            )
        )
    if not parts:
        return unsettled("this needs steps to a target at four batches or more")
    return together(parts, table, _published())


def _slope(batch: int, steps: float, larger: int, fewer: float) -> float:
    """The slope by which log steps fall over log batch: 1 if doubling the batch halves the steps."""
    return math.log(steps / fewer) / math.log(larger / batch)


def _saved(slope: float) -> str:
    """The share of steps that doubling the batch saves."""
    return formatting.percent(1 - 2**-slope) if slope > 0.005 else "nothing"


def _steps_row(fit: Regimes, batch: int, steps: float) -> Row:
    published = PUBLISHED.get(batch) if "cnn" in fit.task else None
    return {
        "task": fit.task,
        "batch": batch,
        "steps": round(steps),
        "samples": round(steps) * batch,
        "published steps (MNIST CNN to 99 %)": published if published is not None else "",
    }


def _published() -> str:
    batches = sorted(PUBLISHED)
    steep = _slope(batches[0], PUBLISHED[batches[0]], 32, PUBLISHED[32])
    flat = _slope(2048, PUBLISHED[2048], batches[-1], PUBLISHED[batches[-1]])
    return (
        "Published (Shallue et al. 2018, simple CNN on MNIST to 99 %): a doubling saves "
        f"{_saved(steep)} of the steps up to batch 32 and {_saved(flat)} "
        "beyond 2,048."
    )


def _noise_scale(results: Results) -> Finding:
    parts: list[tuple[bool, str]] = []
    table: list[Row] = []
    for row in noise_scales(results.records):
        if row.scale is None or row.critical is None:
            continue
        ratio = row.scale.value / row.critical.value
        parts.append(
            (
                1 / FACTOR <= ratio <= FACTOR,
                f"{row.task}: the noise scale is {row.scale.value:,.0f} and the critical batch "
                f"{row.critical.value:,.0f} ({row.critical.low:,.0f} to {row.critical.high:,.0f}), "
                f"{max(ratio, 1 / ratio):.1f}x apart",
            )
        )
        table.append(
            {
                "task": row.task,
                "noise scale": round(row.scale.value),
                "critical batch": round(row.critical.value),
                "ratio": f"{ratio:.2f}",
            }
        )
    if not parts:
        return unsettled("this needs runs with noise_scale, and steps to a target at four batches or more")
    return together(parts, table, "Published (McCandlish et al. 2018, MNIST): 900 and 200, 4.5x apart.")


LARGE_BATCH = Claim(
    "large-batch",
    "With a learning rate that grows with the batch and a gradual warm-up, accuracy is kept while the batch "
    "grows 32x; without scaling, or without warm-up, it is not.",
    "Goyal et al. 2017: 23.60 % error at 256, 23.74 % at 8,192; without warm-up 24.84 %",
    _large_batch,
)
CRITICAL_BATCH = Claim(
    "critical-batch",
    "Doubling the batch halves the steps to a target up to a critical batch, then returns diminish, and in "
    "the end a larger batch saves nothing.",
    "Shallue et al. 2018",
    _critical_batch,
)
NOISE_SCALE = Claim(
    "noise-scale",
    f"The noise of gradients predicts the critical batch, within a factor of {FACTOR:g}.",
    "McCandlish et al. 2018",
    _noise_scale,
)
