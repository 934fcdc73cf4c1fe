"""Data against model parallelism: the same model and the same two workers under each strategy.

    python benchmarks/model_parallel/compare.py [--seconds 120] [--only mnist-cnn] [--json]

Every cell is one run to the target that is named here (or until the seconds are over): speed, the peak memory
of each worker (resident, the shared parameters counted at everyone who touches them), bytes that all workers
moved per step, and training seconds and samples to the target. Run by run, because each uses both cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import manyhands as mh
from manyhands.core import formatting
from manyhands.core.errors import ManyhandsError
from manyhands.records.record import RunRecord

BLOOD = Path(__file__).resolve().parents[3] / "shared" / "data" / "blood-cells"


class Task(NamedTuple):
    """What is trained, to which accuracy, and how often that is looked at."""

    name: str
    target: float
    evaluate_every: float
    batch: int
    options: dict[str, Any]


TASKS = [
    Task("mnist-cnn", 0.97, 0.05, 256, {}),
    Task("mnist-resnet", 0.97, 0.1, 256, {}),
    Task("blood-vgg19", 0.8, 0.25, 64, {"size": 32, "data": str(BLOOD)}),
]
STRATEGIES: list[tuple[str, int, dict[str, Any]]] = [
    ("single", 1, {}),
    ("allreduce", 2, {}),
    ("layers", 2, {}),
    ("pipeline", 2, {"micro_batches": 4}),
    ("sharded", 2, {}),
]


class Row(NamedTuple):
    """One run."""

    task: str
    strategy: str
    samples_per_second: float
    memory: list[int]  # bytes, by worker
    moved: float  # bytes per step, all workers
    target: float
    seconds: float | None
    samples: int | None
    cut: str


def measure(task: Task, strategy: str, workers: int, options: dict[str, Any], seconds: float) -> Row:
    """Train, and look at the record."""
    with tempfile.TemporaryDirectory() as folder:
        record: RunRecord = mh.train(
            task.name,
            options=task.options,
            strategy=strategy,
            strategy_options=options,
            workers=workers,
            threads=1,
            batch=task.batch,
            target=task.target,
            stop_at_target=True,
            evaluate_every=task.evaluate_every,
            seconds=seconds,
            checkpoint_every=1e9,
            restarts=0,
            launcher="local",  # one worker as well, so that its memory is its own
            out=Path(folder) / "run",
            quiet=True,
        )
    moved = sum(each["bytes"] for rank in record.traffic for each in rank.values())
    return Row(
        task.name,
        strategy,
        record.samples_per_second,
        record.memory,
        moved / max(1, record.steps),
        task.target,
        record.target_seconds,
        record.target_samples,
        record.choices.get("cut", ""),
    )


def main() -> None:
    """Run all cells and print the table as Markdown."""
    parser = argparse.ArgumentParser(description="Data against model parallelism.")
    parser.add_argument("--seconds", type=float, default=120.0, help="training time of one run at most")
    parser.add_argument("--only", help="one task")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    rows: list[Row] = []
    if not arguments.json:
        print("| task | strategy | images/s | memory per worker | moved per step | to target | after |")
        print("|---|---|---|---|---|---|---|", flush=True)
    for task in TASKS:
        for strategy, workers, options in STRATEGIES:
            if arguments.only in (None, task.name):
                try:
                    rows.append(measure(task, strategy, workers, options, arguments.seconds))
                except ManyhandsError as error:
                    print(f"| {task.name} | {strategy} | {error} |")
                    continue
                if not arguments.json:
                    show(rows[-1])
    if arguments.json:
        print(json.dumps([row._asdict() for row in rows], indent=2))


def show(row: Row) -> None:
    """One line."""
    reached = "not reached" if row.seconds is None else formatting.duration(row.seconds)
    after = "" if row.samples is None else f"{row.samples:,}"
    print(
        f"| {row.task} to {formatting.percent(row.target)} | {row.strategy} | "
        f"{row.samples_per_second:,.0f} | "
        f"{', '.join(formatting.size(each) for each in row.memory)} | {formatting.size(row.moved)} | "
        f"{reached} | "
        f"{after} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
