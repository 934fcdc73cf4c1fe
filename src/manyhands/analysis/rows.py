"""Each record as a flat row of plain values, for results.csv and data frames."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.analysis import groups
from manyhands.analysis.breakdown import STEP_PHASES, breakdown
from manyhands.analysis.crossing import crossing
from manyhands.analysis.scaling import Baseline, baselines
from manyhands.analysis.verdicts import of_runs, word
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results

Pair = tuple[Baseline | None, Baseline | None]


def rows(results: Results) -> list[dict[str, object]]:
    """Return one row per record, in their order, all with the same columns."""
    found: dict[tuple[str, int], Pair] = {}
    made = []
    for record, judged in zip(results.records, of_runs(results), strict=True):
        task, batch = groups.task_name(record), groups.batch(record)
        if (task, batch) not in found:
            found[task, batch] = baselines(results.records, task, batch)
        made.append(_row(record, found[task, batch], results.price, word(judged)))
    return made


def _row(record: RunRecord, pair: Pair, price: float | None, verdict: str) -> dict[str, object]:
    return {
        **_cell(record),
        **_speed(record, pair, price),
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
        "transport": spec.transport,
        "status": record.status,
        "parameters": record.parameters,
        "steps": record.steps,
        "samples": record.samples,
        "epochs": record.epochs,
        "seconds": record.seconds,
        "training_seconds": record.training_seconds,
    }


def _speed(record: RunRecord, pair: Pair, price: float | None) -> dict[str, object]:
    """The columns about speed; empty if the run shared the machine with others."""
    counts = groups.measured(record)
    rate = record.throughput if counts else None
    one, every = (baseline.throughput.median if baseline else None for baseline in pair)
    speed_up = rate / one if rate and one else None
    seconds = groups.cores_held(record) * record.training_seconds if counts else None
    return {
        "throughput": rate,
        "baseline": pair[0].name if pair[0] and counts else None,
        "baseline_batch": pair[0].batch if pair[0] and counts else None,
        "speed_up": speed_up,
        "efficiency": speed_up / (record.spec.workers * groups.threads(record)) if speed_up else None,
        "against_threads": rate / every if rate and every else None,
        "worker_seconds": seconds,
        "money": price * seconds / 3600 if price is not None and seconds is not None else None,
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
