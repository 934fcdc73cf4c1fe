"""Claims about workers: data or model parallelism, more workers, asynchronous workers."""

from __future__ import annotations

from manyhands.analysis import groups
from manyhands.analysis.asynchrony import Asynchrony, asynchronous
from manyhands.analysis.fine_line import FineLine, fine_lines
from manyhands.analysis.scaling import Point, curves, points
from manyhands.claims.base import Claim, Finding, Row, together, unsettled
from manyhands.core.registry.strategies import DATA_PARALLEL
from manyhands.records.study_results import Results


def _data_or_model(results: Results) -> Finding:
    parts: list[tuple[bool, str]] = []
    table: list[Row] = []
    for task in groups.tasks(results.records):
        found = [point for point in points(results.records, task) if point.workers > 1]
        for workers, batch in sorted({(point.workers, point.batch) for point in found}):
            here = [point for point in found if (point.workers, point.batch) == (workers, batch)]
            data = [point for point in here if point.variant.split()[0] == DATA_PARALLEL]
            model = [point for point in here if groups.traits_of(point.variant).staged]
            if not data or not model:
                continue
            table += [_speed_row(task, point) for point in here]
            best = max(model, key=_median)
            ratio = _median(data[0]) / _median(best)
            parts.append(
                (
                    ratio > 1,
                    f"{task}: {data[0].variant} on {workers} workers runs {ratio:.2f}x as fast as "
                    f"{best.variant}, the fastest model-parallel strategy",
                )
            )
    if not parts:
        return unsettled("this needs timed runs of allreduce and of layers or pipeline at the same batch")
    return together(parts, table)


def _median(point: Point) -> float:
    return point.throughput.median


def _speed_row(task: str, point: Point) -> Row:
    return {
        "task": task,
        "strategy": point.variant,
        "workers": point.workers,
        "batch": point.batch,
        "samples/s": round(_median(point)),
        "against one thread": f"{point.speed_up.median:.2f}x" if point.speed_up else "-",
        "against all threads": f"{point.against_threads.median:.2f}x" if point.against_threads else "-",
    }


def _more_workers(results: Results) -> Finding:
    scaling = curves(results.records, results.price)
    lines = fine_lines(scaling)
    if not lines:
        return unsettled("this needs timed runs of a strategy at two worker counts or more")
    table: list[Row] = [
        {
            **_speed_row(curve.task, point),
            "worker-seconds per million samples": round(point.worker_seconds),
        }
        for curve in scaling
        for point in curve.points
    ]
    slower = [line for line in lines if line.slower_from is not None]
    shown = slower or lines
    return Finding(bool(slower), [_sentence(line) for line in shown], table)


def _sentence(line: FineLine) -> str:
    """`mnist-mlp, allreduce, batch 256: more workers do not pay: ...`."""
    sentence = line.sentence.rstrip(".")
    return f"{line.task}, {line.variant}, {line.batch}: {sentence[0].lower()}{sentence[1:]}"


def _asynchrony(results: Results) -> Finding:
    rows = [row for row in asynchronous(results.records) if row.workers > 1]
    table: list[Row] = [_stale_row(row) for row in rows]
    free = [row for row in rows if groups.traits_of(row.variant).asynchronous]
    settled = [row for row in free if row.samples_ratio is not None or row.samples is None]
    if not settled:
        return unsettled(
            "this needs server or hogwild as well as allreduce, with a target that some of them reach"
        )
    parts: list[tuple[bool, str]] = []
    for row in settled:
        who = f"{row.task}: {row.variant} on {row.workers} workers"
        if row.samples is None:
            parts.append((True, f"{who} never reached the target"))
            continue
        assert row.samples_ratio is not None
        ratio = f"{row.samples_ratio:.2f}x the samples of allreduce"
        more = f"needs {ratio} at a staleness of {row.staleness:.2g}"
        time = f" and {row.seconds_ratio:.2f}x its time" if row.seconds_ratio is not None else ""
        parts.append((row.samples_ratio >= 1.0, f"{who} {more}{time}"))
    return together(parts, table)


def _stale_row(row: Asynchrony) -> Row:
    return {
        "task": row.task,
        "strategy": row.variant,
        "workers": row.workers,
        "batch": row.batch,
        "staleness": round(row.staleness, 2),
        "samples to the target": round(row.samples.median) if row.samples else "not reached",
        "seconds to the target": round(row.seconds.median, 1) if row.seconds else "-",
    }


DATA_OR_MODEL = Claim(
    "data-or-model",
    "Where the model fits a worker, data parallelism is faster than model parallelism; layers on successive "
    "workers bring nothing, and a pipeline wins back a part.",
    "Krizhevsky 2014, Huang et al. 2019 (GPipe)",
    _data_or_model,
)
MORE_WORKERS = Claim(
    "more-workers",
    "More workers are not always better: from some count on each further one makes training slower.",
    "Amdahl 1967 as it shows in tf_benchmarks 2017; Shallue et al. 2018 for the batch",
    _more_workers,
)
ASYNCHRONY = Claim(
    "asynchrony",
    "Workers that do not wait for each other use gradients of older parameters, and pay for it with more "
    "samples to the target.",
    "Recht et al. 2011 (Hogwild), Dean et al. 2012, Zhang et al. 2016 (staleness), Chen et al. 2016",
    _asynchrony,
)
