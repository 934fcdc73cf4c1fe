"""What the trainer costs: its samples/s against a bare hand-written loop, side by side in one process.

    python benchmarks/overhead/run.py [--rounds 8] [--seconds 3] [--json]

All use one thread and the same model, data and optimizer, timed step by step without the first of a round.
The trainer's steps hold its timing, journal and checks. The trainer also keeps freed memory in the
process; what the trainer itself costs is therefore shown against a bare loop that is given the same (`kept`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import manyhands
from manyhands.core.allocator import kept_memory
from manyhands.records.run_folder import RunFolder
from manyhands.tasks import find

HERE = Path(__file__).parent


class Case(NamedTuple):
    """One row: a task of tasks.py, a batch, about how many samples/s, and the least ratio to show."""

    task: str
    batch: int
    rate: int
    least: float


WARM_UP = 3  # steps
CASES = [Case("mlp", 32, 4_000, 0.93), Case("mlp", 128, 7_000, 0.97), Case("cnn", 128, 700, 0.97)]


class Row(NamedTuple):
    """What a case showed: samples/s of the best round of each side, and the trainer's share of both loops.

    `median_step` compares the median step of each round, and takes the median of the rounds: a burst of noise
    in a round moves it least.
    """

    task: str
    batch: int
    bare: float
    kept: float
    trainer: float
    of_bare: float
    of_kept: float
    median_step: float
    least: float


def bare_loop(inputs: Tensor, targets: Tensor, model: nn.Module, batch: int, samples: int) -> list[float]:
    """Seconds per step of the loop that one would write by hand."""
    decayed = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": 1e-4}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True, fused=True)
    order = torch.randperm(len(targets))
    moments = [time.perf_counter()]
    for first in range(0, samples, batch):
        index = order[first : first + batch]
        loss = nn.functional.cross_entropy(model(inputs[index]), targets[index])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        moments.append(time.perf_counter())
    return [after - before for before, after in pairwise(moments)]


def trainer_loop(case: Case, samples: int) -> list[float]:
    """Seconds per step of the trainer, from its journal."""
    with tempfile.TemporaryDirectory() as folder:
        record = manyhands.train(
            f"{HERE / 'tasks.py'}:{case.task}",
            batch=case.batch,
            samples=samples,
            epochs=1,
            lr=0.01,
            recipe_options={"scaling": "none", "decay": "none"},
            threads=1,
            out=Path(folder) / "run",
            quiet=True,
        )
        moments = [0.0, *(step.seconds for step in RunFolder(Path(record.run)).steps())]
    return [after - before for before, after in pairwise(moments)]


def measure(case: Case, rounds: int, seconds: float) -> Row:
    """Interleave rounds of the three sides, each first in turn."""
    task = find.build(f"{HERE / 'tasks.py'}:{case.task}", {})
    assert isinstance(task.train, manyhands.ArrayData)
    inputs, targets = task.preprocess.float()(task.train.inputs), task.train.targets
    steps = max(WARM_UP + 5, round(case.rate * seconds / case.batch))
    samples = min(len(targets), steps * case.batch)

    def bare() -> list[float]:
        return bare_loop(inputs, targets, task.model(), case.batch, samples)

    def kept() -> list[float]:
        with kept_memory():
            return bare()

    def trainer() -> list[float]:
        return trainer_loop(case, samples)

    sides = {"bare": bare, "kept": kept, "trainer": trainer}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    medians: dict[str, list[float]] = {name: [] for name in sides}
    order = deque(sides)
    for _ in range(rounds):
        for name in order:
            times = sides[name]()[WARM_UP:]
            rates[name].append(case.batch * len(times) / sum(times))
            medians[name].append(statistics.median(times))
        order.rotate(1)
    best = {name: max(values) for name, values in rates.items()}
    ratios = [theirs / ours for ours, theirs in zip(medians["trainer"], medians["kept"], strict=True)]
    return Row(
        case.task,
        case.batch,
        best["bare"],
        best["kept"],
        best["trainer"],
        best["trainer"] / best["bare"],
        best["trainer"] / best["kept"],
        statistics.median(ratios),
        case.least,
    )


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description="The trainer against a bare loop.")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0, help="about how long a round of one side takes")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(case, arguments.rounds, arguments.seconds) for case in CASES]
    if arguments.json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
        return
    print(
        f"{'task':<5}{'batch':>6}{'bare':>9}{'kept':>9}{'trainer':>9}   of bare  of kept  median step  wanted"
    )
    for row in rows:
        print(
            f"{row.task:<5}{row.batch:>6}{row.bare:>7,.0f}/s{row.kept:>7,.0f}/s{row.trainer:>7,.0f}/s"
            f"{row.of_bare:>10.3f}{row.of_kept:>9.3f}{row.median_step:>13.3f}{row.least:>8.2f}"
        )


if __name__ == "__main__":
    main()
