"""Each record as a flat row of plain values, for results.csv and data frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.answer import answers
from manyhands.analysis.breakdown import STEP_PHASES, breakdown
from manyhands.analysis.crossing import crossing
from manyhands.analysis.groups import Key
from manyhands.analysis.scaling import Baseline, Point, baselines, points
from manyhands.analysis.verdicts import of_runs, word
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results

Pair = tuple[Baseline | None, Baseline | None]


def rows(results: Results) -> list[dict[str, object]]:
    """Return one row per record, in their order, all with the same columns."""
    found: dict[tuple[str, int], Pair] = {}
    cells = _cells(results)
    made = []
    for record, judged in zip(results.records, of_runs(results), strict=True):
        task, batch = groups.task_name(record), groups.batch(record)
        if (task, batch) not in found:
            found[task, batch] = baselines(results.records, task, batch, results.blocks)
        cell = cells.get((task, groups.key(record)))
        said = word(judged, won=cell is not None and cell.apart is False)
        made.append(_row(record, found[task, batch], cell, results.price, said))
    return made


class _Told(NamedTuple):
    """What is known of the cell of a record, over all of its runs and rounds."""

    point: Point
    apart: bool | None  # whether it is told apart from the winners; None if it is in no comparison


def _cells(results: Results) -> dict[tuple[str, Key], _Told]:
    won: dict[tuple[str, Key], bool] = {}
    for answer in answers(results):
        for number, group in enumerate(answer.groups):
            for each in group:
                won[answer.task, Key(each.variant, each.workers, each.threads, each.batch)] = number > 0
    found = {}
    for task in groups.tasks(results.records):
        for point in points(results.records, task, results.price, results.blocks):
            key = Key(point.variant, point.workers, point.threads, point.batch)
            found[task, key] = _Told(point, won.get((task, key)))
    return found


def _row(
    record: RunRecord, pair: Pair, cell: _Told | None, price: float | None, verdict: str
) -> dict[str, object]:
    return {
        **_cell(record),
        **_speed(record, pair, cell, price),
        **_sure(cell),
        **_arrival(record),
        **_step(record),
        "staleness": record.mean_staleness,
        "noise_scale": record.noise.scale if record.noise else None,
        "machine_noise": record.machine_noise,
        "timed": record.timed,
        "verdict": verdict,
        "message": record.message,
        "resumed": record.resumed,
        "host": record.environment.host,
        "cores": record.environment.cores,
        "device": record.environment.device,
        "started": record.environment.started,
        "run": record.run,
    }


def _cell(record: RunRecord) -> dict[str, object]:
    spec = record.spec
    return {
        "task": groups.task_name(record),
        "variant": groups.variant(record),
        "strategy": spec.strategy,
        "workers": spec.workers,
        "servers": spec.servers,
        "ranks": spec.ranks,
        "hosts": len(set(record.hosts)) or 1,
        "threads": groups.threads(record),
        "batch": groups.batch(record),
        "recipe": groups.recipe_variant(record),
        "recipe_line": record.recipe_line,
        "lr": record.recipe.get("lr"),
        "seed": spec.seed,
        "repeat": record.repeat,
        "label": record.label,
        "transport": spec.transport,
        "status": record.status,
        "parameters": record.parameters,
        "steps": record.steps,
        "samples": record.samples,
        "epochs": record.epochs,
        "seconds": record.seconds,
        "training_seconds": record.training_seconds,
    }


def _speed(record: RunRecord, pair: Pair, cell: _Told | None, price: float | None) -> dict[str, object]:
    """The columns about speed; empty if the run shared the machine with others."""
    counts = groups.measured(record)
    rate = record.throughput if counts else None
    one, every = (baseline.throughput.median if baseline else None for baseline in pair)
    speed_up, against = rate / one if rate and one else None, rate / every if rate and every else None
    if record.paired and cell and cell.point.cell:  # not of the run as a whole, but next to the baseline
        rate, *gains = cell.point.throughput.median, cell.point.speed_up, cell.point.against_threads
        speed_up, against = (gain.median if gain else None for gain in gains)
    seconds = groups.cores_held(record) * record.training_seconds if counts else None
    return {
        "throughput": rate,
        "baseline": pair[0].name if pair[0] and counts else None,
        "baseline_batch": pair[0].batch if pair[0] and counts else None,
        "speed_up": speed_up,
        "efficiency": speed_up / (record.spec.workers * groups.threads(record)) if speed_up else None,
        "against_threads": against,
        "worker_seconds": seconds,
        "money": price * seconds / 3600 if price is not None and seconds is not None else None,
    }


def _sure(cell: _Told | None) -> dict[str, object]:
    """The columns about the cell: its intervals over all runs or paired rounds, and whether it lost."""
    point = cell.point if cell else None
    speed, gain = (point.throughput, point.speed_up) if point else (None, None)
    return {
        "throughput_low": speed.low if speed else None,
        "throughput_high": speed.high if speed else None,
        "speed_up_low": gain.low if gain else None,
        "speed_up_high": gain.high if gain else None,
        "rounds": point.throughput.n if point and point.cell else None,
        "told_apart": cell.apart if cell else None,
    }


def _arrival(record: RunRecord) -> dict[str, object]:
    """The columns about the target; empty if it was not reached, or if the run did not end well."""
    found = crossing(record) if groups.succeeded(record) else None
    return {
        "metric_name": record.metric_name,
        "metric": record.metric,
        "best_metric": record.best_metric,
        "loss": record.loss,
        "target": record.target,
        "reached": found is not None,
        "target_seconds": found.seconds if found and groups.measured(record) else None,
        "target_steps": found.steps if found else None,
        "target_samples": found.samples if found else None,
    }


def _step(record: RunRecord) -> dict[str, object]:
    step = breakdown(record)
    times = record.worker_step_times
    return {
        "step_seconds": step.step_seconds,
        "step_low": times.low if times else None,
        "step_median": times.median if times else None,
        "step_high": times.high if times else None,
        **{f"phase_{name}": step.phases[name] for name in STEP_PHASES},
        "bytes_per_step": step.bytes_per_step,
        "messages_per_step": step.messages_per_step,
        "rank_spread": step.rank_spread,
        "memory": step.memory,
        "peak_memory": record.peak_memory,
    }


def columns(made: Sequence[dict[str, object]]) -> list[str]:
    """The column names of a list of rows."""
    return list(made[0]) if made else []
