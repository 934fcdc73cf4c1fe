"""`manyhands show`: the settings and the result of a run, read from its folder without torch."""

from __future__ import annotations

import json as json_format
import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from manyhands.callbacks.progress import computed, outcome, skipped
from manyhands.core import formatting
from manyhands.records.phases import training_phases
from manyhands.records.record import RunRecord, StepRecord
from manyhands.records.run_folder import RunFolder

EXAMPLES = """Examples:

manyhands show runs/mnist-cnn-7f3a2b1c09de

manyhands show runs/mnist-cnn-7f3a2b1c09de --json | jq .metric"""


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON on standard output.")
    ] = False,
) -> None:
    """Show a run: its settings, result, curves and where its time went."""
    folder = RunFolder(run)
    spec, record, steps = folder.spec(), folder.record(), folder.steps()
    if json:
        if record is not None:
            print(formatting.json_printed(record.model_dump_json(indent=2)))
        else:
            print(
                json_format.dumps(
                    {
                        "run": str(run),
                        "status": "unfinished",
                        "spec": spec.model_dump(mode="json"),
                        "steps": len(steps),
                    },
                    indent=2,
                )
            )
        return
    lines = [
        f"{spec.task} · run {spec.id} · {_status(record, steps, run)}",
        spec.division
        + (f" · {record.recipe_line}" if record else f" · {spec.recipe}")
        + "".join(f" · {each}" for each in computed(spec))
        + f" · {spec.strategy} on {spec.transport} · seed {spec.seed}",
        *_curves(steps, record.metric_name if record else "metric"),
        *(_result(record) if record is not None else []),
    ]
    for line in lines:
        print(formatting.line(line))


def _status(record: RunRecord | None, steps: list[StepRecord], run: Path) -> str:
    resume = f"continue with: manyhands train --resume {run}"
    if record is None:
        last = f"stopped after step {steps[-1].step:,}" if steps else "no step yet"
        return f"not finished, {last}; {resume}"
    if record.status == "interrupted":
        return f"interrupted at step {record.steps:,}; {resume}"
    if record.status == "diverged":
        return f"diverged: {record.message}"
    ended = {"finished": "finished", "target": "stopped at its target"}[record.status]
    return f"{ended}; {record.message}" if record.message else ended


def _result(record: RunRecord) -> list[str]:
    name, here = record.metric_name, record.environment
    best = formatting.score(record.best_metric, name)
    cores = f"{formatting.plural(here.threads, 'thread')} of {formatting.plural(here.cores, 'core')}"
    resumed = f"resumed {formatting.plural(record.resumed, 'time')}" if record.resumed else "never resumed"
    result = f"{name} {formatting.score(record.metric, name)} (best {best}), {outcome(record)}"
    return [
        f"result     {result if record.spec.evaluate_every else outcome(record)}",
        f"speed      {formatting.rate(record.samples_per_second, record.unit)}; {record.steps:,} steps, "
        f"{formatting.count(record.samples, record.unit)} in "
        f"{formatting.duration(record.training_seconds)} training, "
        f"{formatting.duration(record.seconds)} in total{skipped(record)}",
        f"time       {formatting.where_the_time_went(training_phases(record.worker_phases))}",
        *_step_times(record),
        *_noise(record),
        *_staleness(record),
        *_workers(record),
        *(f"lost       {who}" for who in record.lost),
        *([f"stages     {record.choices['cut'].removeprefix('cut: ')}"] if "cut" in record.choices else []),
        f"memory     {_memory(record)}",
        f"machine    {here.cpu}, {cores}, torch {here.torch}, python {here.python}, {here.host}",
        f"started    {here.started}, commit {(here.commit or 'none')[:12]}, {resumed}",
    ]


def _step_times(record: RunRecord) -> list[str]:
    """`step       15 ms on average (14 ms to 18 ms, 8 of 10 steps), without the first steps`."""
    times = record.worker_step_times
    if times is None:
        return []
    spread = f"{formatting.duration(times.low)} to {formatting.duration(times.high)}, 8 of 10 steps"
    return [f"step       {formatting.duration(times.mean)} on average ({spread}), without the first steps"]


def _noise(record: RunRecord) -> list[str]:
    """The gradient noise scale, if it was measured."""
    noise = record.noise
    if noise is None:
        return []
    steps = formatting.plural(noise.steps, "step")
    if noise.scale is None:
        return [f"noise      {steps} are too few to measure the gradient noise scale: train for longer"]
    sizes = f"gradients of {noise.small:,.0f} and {noise.big:,.0f} {record.unit}, {steps}"
    return [f"noise      scale {noise.scale:,.0f}: much larger batches gain little ({sizes})"]


def _memory(record: RunRecord) -> str:
    """`410 MB at most`, and the memory for training per rank if there are several."""
    if not record.peak_memory:
        return "not known on this system"
    most = f"{formatting.size(record.peak_memory)} at most"
    if record.memory_of == "device":
        most = f"{formatting.size(record.peak_memory)} of the GPU at most"
        if record.host_memory is not None:
            most += f", {formatting.size(record.host_memory)} of the host"
    if len(record.memory) < 2:
        return most
    return f"{most}; training {', '.join(formatting.size(each) for each in record.memory)} by rank"


def _workers(record: RunRecord) -> list[str]:
    """One line per rank if there are several: its communication, waiting, traffic, work and host."""
    if len(record.phases) < 2:
        return []
    lines = []
    for rank in range(len(record.phases)):
        training = training_phases(record.phases_of(rank))
        total = sum(training.values()) or 1.0
        shares = ", ".join(
            f"{name} {formatting.percent(training.get(name, 0.0) / total)}"
            for name in ("communication", "wait")
        )
        traffic = record.traffic[rank].values() if record.traffic else ()
        moved = formatting.size(sum(operation["bytes"] for operation in traffic))
        host = f" on {record.hosts[rank]}" if len(set(record.hosts)) > 1 else ""
        role = "server" if rank < record.spec.servers else "worker"
        lines.append(f"{f'{role} {rank}':<10} {shares}, {moved} exchanged{_work(record, rank)}{host}")
    return lines


def _work(record: RunRecord, rank: int) -> str:
    """`, 12,416 images in 388 steps`, if workers may have done different amounts of work."""
    if not record.staleness or rank < record.spec.servers:
        return ""
    share = record.shares[rank]
    dropped = f", {formatting.plural(share.dropped, 'piece')} dropped as too late" if share.dropped else ""
    return (
        f", {formatting.count(share.samples, record.unit)} in "
        f"{formatting.plural(share.steps, 'step')}{dropped}"
    )


def _staleness(record: RunRecord) -> list[str]:
    """The mean staleness of updates, and its histogram as a row of blocks."""
    if record.mean_staleness is None:
        return []
    most = max(record.staleness)
    if most == 0:
        return ["staleness  none"]
    counts = [float(record.staleness.get(stale, 0)) for stale in range(most + 1)]
    return [
        f"staleness  {record.mean_staleness:.2f} updates on average, 0 {_blocks(_thin(counts, 50))} {most}"
    ]


def _curves(steps: list[StepRecord], name: str) -> list[str]:
    """The loss as a row of blocks, and some evaluations (the first, the last and up to six between)."""
    if not steps:
        return []
    losses = [step.loss for step in steps]
    odd = sum(not math.isfinite(loss) for loss in losses)
    lines = [
        f"loss       {losses[0]:.3g} {_blocks(_thin(losses, 50))} {losses[-1]:.3g}"
        + (f" ({formatting.plural(odd, 'step')} without a finite loss)" if odd else "")
    ]
    evaluated = [step for step in steps if step.metric is not None]
    if len(evaluated) > 8:
        stride = (len(evaluated) - 1) / 7
        evaluated = [evaluated[round(k * stride)] for k in range(8)]
    if evaluated:
        lines.append(
            f"{name:<10} "
            + "  ".join(f"{formatting.score(step.metric, name)} @ {step.samples:,}" for step in evaluated)
        )
    return lines


def _thin(values: list[float], most: int) -> list[float]:
    """Return at most this many values: the means of equal stretches, without values that are not finite."""
    if len(values) <= most:
        return values
    edges = [round(k * len(values) / most) for k in range(most + 1)]
    return [_mean(values[a:b]) for a, b in pairwise(edges)]


def _mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(value / len(finite) for value in finite) if finite else math.nan  # their sum may overflow


def _blocks(values: list[float]) -> str:
    """A row of blocks, from the lowest value to the highest; a cross for a value that is not finite."""
    halves = [value / 2 for value in values]  # the difference of two floats may overflow
    finite = [half for half in halves if math.isfinite(half)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(
        blocks[round((half - low) / ((high - low) or 1) * 7)] if math.isfinite(half) else "×"
        for half in halves
    )
