"""Two stages against one worker that takes the same micro-batches, and against torch.distributed.pipelining.

    python benchmarks/model_parallel/run.py [--rounds 5] [--steps 6] [--only mlp:4] [--batch 256] [--json]

Each worker has one thread. Every round runs all sides of a case in turn, each first in one of them; a side's
time is that of the median step of its best round, and `median` is the median over rounds of theirs / ours.
The ideal speed-up of two stages with m micro-batches is 2m / (m + 1); what counts is the part of it reached.
torch.distributed.pipelining runs with one thread per worker, and with its default: one per core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import sides

from manyhands.core import environment
from manyhands.launchers.base import SupervisionOptions
from manyhands.launchers.local import LocalLauncher
from manyhands.strategies.pipeline.schedule import ideal_speedup, idle_share

WARM_UP = 2  # steps
BATCHES = {"mlp": 1024, "cnn": 64}
CUTS = {"mlp": 3, "cnn": 5}  # torch's pipelining is told where; ours finds it
MICRO_BATCHES = (1, 2, 4, 8)
OF_IDEAL = 0.88  # wanted at 4 and 8


class Row(NamedTuple):
    """One network and number of micro-batches: seconds per step, ratios (best rounds, median of rounds)."""

    task: str
    micro_batches: int
    ours: float
    alone: float  # one worker, the same micro-batches
    whole: float  # one worker, the whole batch at once
    torch: float  # one thread per worker
    crowded: float  # its default: as many threads per worker as there are cores
    speedup: float  # against alone
    median: float
    ideal: float
    against_torch: float
    against_crowded: float
    idle: float  # the mean of both workers, measured
    predicted_idle: float

    @property
    def of_ideal(self) -> float:
        """The part of the ideal speed-up that is reached."""
        return self.speedup / self.ideal


class Case(NamedTuple):
    """What is measured."""

    task: str
    batch: int
    micro_batches: int
    schedule: str


def measure(case: Case, rounds: int, steps: int, folder: Path) -> Row:
    """One row."""
    task, batch, micro_batches, schedule = case
    local, idle = LocalLauncher(), list[float]()

    def ours() -> list[float]:
        with tempfile.TemporaryDirectory(dir=folder) as room:
            found = sides.ours(task, batch, micro_batches, WARM_UP + steps, schedule, 0, Path(room))
        idle.append(statistics.mean(found.idle))
        return found.times

    def alone(parts: int) -> Callable[[], list[float]]:
        return lambda: local.launch(
            sides.alone, 1, task, batch, parts, WARM_UP + steps, 1, supervision=SupervisionOptions()
        )[0]

    def pipelining(threads: int) -> Callable[[], list[float]]:
        given = task, batch, micro_batches, WARM_UP + steps, schedule, CUTS[task], threads
        return lambda: local.launch(sides.torch_pipelining, 2, *given, supervision=SupervisionOptions())[0]

    found = {
        "ours": ours,
        "alone": alone(micro_batches),
        "whole": alone(1),
        "torch": pipelining(1),
        "crowded": pipelining(environment.cores()),
    }
    times: dict[str, list[float]] = {name: [] for name in found}
    order = deque(found)
    for _ in range(rounds):
        for name in order:
            times[name].append(statistics.median(found[name]()[WARM_UP:]))
        order.rotate(1)
    best = {name: min(each) for name, each in times.items()}
    ratios = [theirs / mine for theirs, mine in zip(times["alone"], times["ours"], strict=True)]
    return Row(
        task,
        micro_batches,
        best["ours"],
        best["alone"],
        best["whole"],
        best["torch"],
        best["crowded"],
        best["alone"] / best["ours"],
        statistics.median(ratios),
        ideal_speedup(2, micro_batches),
        best["torch"] / best["ours"],
        best["crowded"] / best["ours"],
        min(idle),
        idle_share(2, micro_batches),
    )


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description="Two stages, side by side.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of each side in each round")
    parser.add_argument("--schedule", default="1f1b", choices=("gpipe", "1f1b"))
    parser.add_argument("--only", help="one case, e.g. mlp:4")
    parser.add_argument("--batch", type=int, help="another batch than 1024 (mlp) and 64 (cnn)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    rows: list[Row] = []
    if not arguments.json:
        print(
            f"{'task':<5}{'m':>3}{'ours ms':>9}{'alone':>8}{'whole':>7}{'torch':>7}{'crowded':>8}"
            f"{'speed-up':>10}{'median':>8}{'ideal':>6}{'part':>6}{'wanted':>9}{'of torch':>10}{'crowded':>9}"
            f"{'idle':>6}{'predicted':>11}"
        )
    with tempfile.TemporaryDirectory() as name:
        for task in BATCHES:
            for micro_batches in MICRO_BATCHES:
                if arguments.only in (None, f"{task}:{micro_batches}"):
                    batch = arguments.batch or BATCHES[task]
                    case = Case(task, batch, micro_batches, arguments.schedule)
                    row = measure(case, arguments.rounds, arguments.steps, Path(name))
                    rows.append(row)
                    if not arguments.json:
                        show(row)
    if arguments.json:
        print(json.dumps([{**row._asdict(), "of_ideal": row.of_ideal} for row in rows], indent=2))


def show(row: Row) -> None:
    """One line."""
    wanted = f">= {OF_IDEAL:g}" if row.micro_batches >= 4 else ""
    print(
        f"{row.task:<5}{row.micro_batches:>3}{1000 * row.ours:>9.0f}{1000 * row.alone:>8.0f}"
        f"{1000 * row.whole:>7.0f}{1000 * row.torch:>7.0f}{1000 * row.crowded:>8.0f}{row.speedup:>9.2f}x"
        f"{row.median:>7.2f}x{row.ideal:>6.2f}{row.of_ideal:>6.2f}{wanted:>9}{row.against_torch:>9.2f}x"
        f"{row.against_crowded:>8.2f}x{row.idle:>6.0%}{row.predicted_idle:>11.0%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
