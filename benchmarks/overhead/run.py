"""What the trainer costs: its samples/s against a bare hand-written loop, side by side in one process.

    python benchmarks/overhead/run.py [--rounds 7] [--seconds 2] [--json]

Both use one thread, the same model, data, sample order, optimiser and rates. The trainer's rate is that of
its record: wall clock of the loop with its timing, journal and checks, without evaluation and checkpoints.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import manyhands
from manyhands.tasks import find

HERE = Path(__file__).parent


class Case(NamedTuple):
    """One row: a task of tasks.py, a batch, about how many samples a second, and the least ratio to show."""

    task: str
    batch: int
    rate: int
    least: float


CASES = [Case("mlp", 32, 4_000, 0.93), Case("mlp", 128, 7_000, 0.97), Case("cnn", 128, 700, 0.97)]


class Row(NamedTuple):
    """What a case showed: the best round of each, and the median of the rounds' ratios."""

    task: str
    batch: int
    bare: float
    trainer: float
    ratio: float
    median_ratio: float
    least: float


def bare_loop(inputs: Tensor, targets: Tensor, model: nn.Module, batch: int, samples: int) -> float:
    """Samples a second of the loop that one would write by hand."""
    decayed = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": 1e-4}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True, fused=True)
    order = torch.randperm(len(targets))
    began = time.perf_counter()
    for first in range(0, samples, batch):
        index = order[first : first + batch]
        loss = nn.functional.cross_entropy(model(inputs[index]), targets[index])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return samples / (time.perf_counter() - began)


def trainer_loop(case: Case, samples: int) -> float:
    """Samples a second of the trainer."""
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
    return record.samples_per_second


def measure(case: Case, rounds: int, seconds: float) -> Row:
    """Interleave rounds of both, the order of the two alternating."""
    task = find.build(f"{HERE / 'tasks.py'}:{case.task}", {})
    assert isinstance(task.train, manyhands.ArrayData)
    inputs, targets = task.preprocess.float()(task.train.inputs), task.train.targets
    samples = min(len(targets), round(case.rate * seconds / case.batch) * case.batch)
    bare: list[float] = []
    trainer: list[float] = []
    for number in range(rounds + 1):
        for turn in (0, 1) if number % 2 else (1, 0):
            if turn:
                trainer.append(trainer_loop(case, samples))
            else:
                bare.append(bare_loop(inputs, targets, task.model(), case.batch, samples))
    bare, trainer = bare[1:], trainer[1:]  # the first round warms up
    ratios = [ours / theirs for ours, theirs in zip(trainer, bare, strict=True)]
    best = max(trainer) / max(bare)
    return Row(case.task, case.batch, max(bare), max(trainer), best, statistics.median(ratios), case.least)


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description="The trainer against a bare loop.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long a round of one side takes")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(case, arguments.rounds, arguments.seconds) for case in CASES]
    if arguments.json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
        return
    print(f"{'task':<6}{'batch':>6}{'bare loop':>12}{'trainer':>10}{'of bare':>9}{'median':>8}{'wanted':>8}")
    for row in rows:
        print(
            f"{row.task:<6}{row.batch:>6}{row.bare:>10,.0f}/s{row.trainer:>8,.0f}/s"
            f"{row.ratio:>9.3f}{row.median_ratio:>8.3f}{row.least:>8.2f}"
        )


if __name__ == "__main__":
    main()
