"""Claims about workers: data or model parallelism, and more workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.pairs import Compared
from manyhands.analysis.scaling import Curve, Point, curves, points
from manyhands.claims import published
from manyhands.claims.base import Claim, Finding, Part, Row, together, unsettled
from manyhands.claims.plots import Dot, Line, Plot
from manyhands.claims.rounds import compare
from manyhands.core import formatting
from manyhands.core.registry.strategies import DATA_PARALLEL
from manyhands.core.statistics import Estimate, Summary, ratio
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results

ROUNDS = 5  # in which both sides were measured next to each other
NOTHING = 1.1  # times one worker: less is nothing to speak of
MANY = 8  # workers without oversubscription: fewer do not show that more are always better


def _data_or_model(results: Results) -> Finding:
    parts: list[Part] = []
    table: list[Row] = []
    plots: list[Plot] = []
    for task in groups.tasks(results.records):
        mine = [record for record in groups.of_task(results.records, task) if groups.measured(record)]
        several = [record for record in mine if record.spec.workers > 1]
        for workers, batch in sorted({(r.spec.workers, groups.batch(r)) for r in several}):
            here = [r for r in several if (r.spec.workers, groups.batch(r)) == (workers, batch)]
            data = [record for record in here if groups.variant(record).split()[0] == DATA_PARALLEL]
            model = [record for record in here if record.spec.traits.staged]
            if not data or not model:
                continue
            found = [point for point in points(mine, task, blocks=results.blocks) if point.batch == batch]
            best = max(model, key=lambda record: _speed(found, record))
            parts.append(_faster(results, task, data[0], best))
            parts += _model_parts(results, task, mine, model)
            table += [_speed_row(task, point) for point in found]
            plots.append(_speed_plot(f"{task}, batch {batch:,}", found))
    if not parts:
        return unsettled("this needs timed runs of allreduce and of layers or pipeline at the same batch")
    return together(parts, table, plots=plots)


def _speed(found: Sequence[Point], record: RunRecord) -> float:
    key = groups.key(record)
    same = [point for point in found if (point.variant, point.workers, point.threads) == key[:3]]
    return same[0].throughput.median if same else 0.0


def _faster(results: Results, task: str, data: RunRecord, model: RunRecord) -> Part:
    whom = f"{groups.variant(model)}, the fastest model-parallel strategy"
    asked = _Asked(f"{task}: data over model parallelism", _named(task, data), whom, 1.0, above=True)
    return _ratio_part(results, asked, data, model)


def _named(task: str, record: RunRecord) -> str:
    return f"{task}: {groups.variant(record)} on {formatting.plural(record.spec.workers, 'worker')}"


def _model_parts(
    results: Results, task: str, mine: Sequence[RunRecord], model: Sequence[RunRecord]
) -> list[Part]:
    """What the layers on successive workers bring, and what a pipeline wins back of it."""
    layers = [record for record in model if record.spec.traits.serial]
    pipelines = [record for record in model if not record.spec.traits.serial]
    alone = [
        record
        for record in mine
        if groups.one_plain_worker(groups.variant(record), record.spec.workers)
        and groups.threads(record) == 1
        and layers
        and groups.batch(record) == groups.batch(layers[0])
    ]
    parts = []
    if layers and alone:
        name = f"{task}: layers on successive workers, over one worker"
        asked = _Asked(name, _named(task, layers[0]), "one worker with one thread", NOTHING, above=False)
        parts.append(_ratio_part(results, asked, layers[0], alone[0]))
    if layers and pipelines:
        ratios = {record.run: seen for record in pipelines if (seen := compare(results, record, layers[0]))}
        best = max(pipelines, key=lambda r: ratios[r.run].ratio.median if r.run in ratios else 0.0)
        asked = _Asked(
            f"{task}: a pipeline over layers",
            *(_named(task, best), groups.variant(layers[0]), 1.0),
            above=True,
        )
        parts.append(_ratio_part(results, asked, best, layers[0]))
    return parts


class _Asked(NamedTuple):
    """What is asked of the speed of one side over another one."""

    name: str
    who: str
    whom: str
    threshold: float
    above: bool


def _ratio_part(results: Results, asked: _Asked, one: RunRecord, other: RunRecord) -> Part:
    name, who, whom, threshold, above = asked
    seen = compare(results, one, other)
    if seen is None:
        unknown, text = Estimate(math.nan, -math.inf, math.inf), f"{who} was not measured next to {whom}"
        return Part(name, unknown, threshold, above, text, doubt="they share no rounds", unit="x")
    found = Estimate(seen.ratio.median, seen.ratio.low, seen.ratio.high)
    text = (
        f"{who} runs {found.value:.2f}x ({found.low:.2f}x to {found.high:.2f}x) as fast as {whom} "
        f"({formatting.plural(seen.rounds, 'round')})"
    )
    few = f"{formatting.plural(seen.rounds, 'paired round')} of the {ROUNDS} that are needed"
    weak = few if seen.rounds < ROUNDS else ""
    settles = _more_rounds(found, seen, threshold)
    return Part(name, found, threshold, above, text, weak, settles=settles, unit="x")


def _more_rounds(found: Estimate, seen: Compared, threshold: float) -> str:
    """How many rounds would make the interval narrow enough."""
    distance = abs(math.log(found.value / threshold))
    reach = math.log(found.high / found.low) / 2 if found.low > 0 else math.inf
    many = seen.rounds * (reach / distance) ** 2 if distance else math.inf
    needed = max(ROUNDS, math.ceil(many)) if many < 100 else 0
    return f"about {needed} rounds would settle it" if needed else "more than 100 rounds would be needed"


def _speed_row(task: str, point: Point) -> Row:
    return {
        "task": task,
        "strategy": point.variant,
        "workers": point.workers,
        "threads": point.threads,
        "batch": point.batch,
        "samples/s": round(point.throughput.median),
        "against one thread": f"{point.speed_up.median:.2f}x" if point.speed_up else "-",
        "against all threads": f"{point.against_threads.median:.2f}x" if point.against_threads else "-",
    }


def _speed_plot(title: str, found: Sequence[Point]) -> Plot:
    dots = [
        Dot(_who(point), point.throughput.median, point.throughput.low, point.throughput.high)
        for point in found
    ]
    return Plot(title, "", "samples/s", [Line("here", dots, joined=False)], zero=True)


def _who(point: Point) -> str:
    return f"{point.variant}, {point.workers_text}"


def _more_workers(results: Results) -> Finding:
    scaling = curves(results.records, results.price)
    if not scaling:
        return unsettled("this needs timed runs of a strategy at two worker counts or more")
    table: list[Row] = [
        {
            **_speed_row(curve.task, point),
            "worker-seconds per million samples": round(point.worker_seconds),
            "more threads than cores": "yes" if point.crowded else "no",
        }
        for curve in scaling
        for point in curve.points
    ]
    fair = [curve for curve in scaling if len(_fair(curve)) > 1]
    plots = [*(_scaling_plot(curve) for curve in scaling), _published()]
    if not fair:
        return unsettled("this needs two worker counts that the cores suffice for")._replace(
            table=table, plots=plots
        )
    worst = min(fair, key=lambda curve: _last(curve).median)
    return together([_slower(worst, scaling)], table, plots=plots)


def _fair(curve: Curve) -> list[Point]:
    """The points with a core for every thread."""
    return sorted((point for point in curve.points if not point.crowded), key=lambda point: point.workers)


def _last(curve: Curve) -> Summary:
    """The speed of the most workers that the cores suffice for, relative to the best smaller count."""
    *fewer, last = _fair(curve)
    return ratio(last.throughput, max((point.throughput for point in fewer), key=lambda rate: rate.median))


def _slower(curve: Curve, scaling: Sequence[Curve]) -> Part:
    seen, most = _last(curve), _fair(curve)[-1]
    found = Estimate(seen.median, seen.low, seen.high)
    text = (
        f"{curve.task}, {curve.variant}: {formatting.plural(most.workers, 'worker')}, the most that "
        f"{formatting.plural(most.cores, 'core')} suffice for, run {found.value:.2f}x ({found.low:.2f}x to "
        f"{found.high:.2f}x) as fast as the best smaller number"
    )
    crowded = [point for line in scaling for point in line.points if point.crowded]
    if crowded:
        text += f"; {max(point.workers for point in crowded)} workers share the cores, which is not the claim"
    weak = "" if most.workers >= MANY else "only as oversubscription: the cores suffice for too few workers"
    settles = f"several hosts with {MANY} workers or more would settle it"
    return Part(
        "the most workers, relative to fewer", found, 1.0, False, text, weak, settles=settles, unit="x"
    )


def _scaling_plot(curve: Curve) -> Plot:
    ordered = sorted(curve.points, key=lambda point: point.workers)
    fair, crowded = _fair(curve), [point for point in ordered if point.crowded]
    lines = [
        _rates("a core for every thread", fair),
        _rates("more threads than cores", [*fair[-1:], *crowded]),
    ]
    return Plot(
        f"{curve.task}, {curve.variant}",
        "workers",
        "images/s",
        [line for line in lines if len(line.dots) > (line is lines[1])],
        log_x=True,
        log_y=True,
    )


def _rates(name: str, found: Sequence[Point]) -> Line:
    return Line(
        name,
        [
            Dot(point.workers, point.throughput.median, point.throughput.low, point.throughput.high)
            for point in found
        ],
    )


def _published() -> Plot:
    lines = [
        Line(name, [Dot(count, speed) for count, speed in found.items()])
        for name, found in published.VGG16.items()
    ]
    return Plot("VGG-16, published", "GPUs", "images/s", lines, log_x=True, log_y=True)


DATA_OR_MODEL = Claim(
    "data-or-model",
    "Where the model fits a worker, data parallelism is faster than model parallelism; layers on successive "
    "workers bring nothing, and a pipeline wins back a part.",
    "Krizhevsky 2014, Huang et al. 2019 (GPipe)",
    _data_or_model,
    "15 min",
    [
        "Speeds are compared in pairs: in each round the two are measured next to each other, so that what "
        f"the machine does meanwhile cancels. {ROUNDS} rounds are needed.",
        f"Layers on successive workers bring nothing if they are at most {NOTHING:g}x as fast as one worker.",
        "The papers compare other networks on GPUs; no figure of theirs has these axes.",
    ],
)
MORE_WORKERS = Claim(
    "more-workers",
    "More workers are not always better: from some count on each further one makes training slower.",
    "Amdahl 1967 as it shows in tf_benchmarks 2017; Shallue et al. 2018 for the batch",
    _more_workers,
    "7 min",
    [
        "Only counts with a core for every thread are judged: workers that share a core are slower for "
        "another reason than the claim's.",
    ],
)
