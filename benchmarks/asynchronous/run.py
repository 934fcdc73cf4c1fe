"""Asynchronous strategies and averaging against one worker, allreduce, and what one would write by hand.

    python benchmarks/asynchronous/run.py [--rounds 5] [--seconds 4] [--only mnist-cnn] [--json]
    python benchmarks/asynchronous/run.py --straggler [--svg FILE]     one worker is four times slower
    python benchmarks/asynchronous/run.py --target [--json]            mnist-cnn to 98.5 %: 1, 2 and 4 workers

Workers have one thread and 32 samples per step each. Every round runs all sides in turn, each first in one of
them; the rate of a side is that of its best round, `median` the median over rounds of rate / one worker's.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import deque
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import chart
import sides
from sides import Rate

import manyhands as mh
from manyhands.core.errors import DivergedError

BATCH = 32  # samples per worker
TASKS = ("mnist-cnn", "mnist-mlp", "sparse-logistic")
WANTED = {"hogwild": 1.85, "server": 1.7, "average every 16": 1.9}  # times one worker, on mnist-cnn
SLOWER = 4.0
IDEAL = 1 + 1 / SLOWER  # of one worker and one that is four times slower
KEPT = 0.6  # of that, by server and hogwild

Side = Callable[[float], Rate]


class Row(NamedTuple):
    """One side of a task."""

    task: str
    side: str
    samples_per_second: float
    updates_per_second: float
    best: float  # times one worker
    median: float
    wanted: float | None
    staleness: dict[int, int]


def strategies() -> dict[str, dict[str, Any]]:
    """Ours, by the names in the table."""
    averages = {
        f"average every {every}": {"strategy": "average", "strategy_options": {"every": every}}
        for every in (1, 4, 16)
    }
    return {
        "allreduce": {"strategy": "allreduce"},
        "hogwild": {"strategy": "hogwild"},
        "server": {"strategy": "server"},
        **averages,
    }


def all_sides(task: str) -> dict[str, Side]:
    """Every side of a task: seconds in, rates out."""

    def ours(workers: int, settings: dict[str, Any]) -> Side:
        return lambda seconds: sides.ours(task, BATCH, seconds, workers, settings)

    found = {"one worker": ours(1, {"strategy": "single"})}
    sparse = task == "sparse-logistic"  # which a server refuses
    for name, settings in strategies().items():
        if not (sparse and name == "server"):
            found[name] = ours(sides.WORKERS, settings)
    found["hogwild by hand"] = partial(sides.by_hand, task, BATCH, False)
    found["by hand, kept"] = partial(sides.by_hand, task, BATCH, True)
    if find_spec("ray") is not None and not sparse:
        found["ray actors"] = partial(sides.ray_server, task, BATCH)
    return found


def interleaved(found: dict[str, Side], rounds: int, seconds: float) -> dict[str, list[Rate]]:
    """Every side once a round, each first in turn."""
    rates: dict[str, list[Rate]] = {name: [] for name in found}
    order = deque(found)
    for _ in range(rounds):
        for name in order:
            rates[name].append(found[name](seconds))
        order.rotate(1)
    return rates


def table(task: str, rates: dict[str, list[Rate]], wanted: dict[str, float]) -> list[Row]:
    """One row per side."""
    one = [rate.samples for rate in rates["one worker"]]
    rows = []
    for name, theirs in rates.items():
        best = max(theirs, key=lambda rate: rate.samples)
        ratios = [rate.samples / reference for rate, reference in zip(theirs, one, strict=True)]
        rows.append(
            Row(
                task,
                name,
                best.samples,
                best.updates,
                best.samples / max(one),
                sides.median(ratios),
                wanted.get(name),
                best.staleness,
            )
        )
    return rows


def straggler(task: str, rounds: int, seconds: float) -> list[Row]:
    """Two workers, one of them four times slower; against one worker that is not."""
    found = all_sides(task)
    keep = ("one worker", "allreduce", "hogwild", "server", "average every 16")
    rates = interleaved(
        {name: _slowed(side, name) for name, side in found.items() if name in keep}, rounds, seconds
    )
    return table(task, rates, {"hogwild": KEPT * IDEAL, "server": KEPT * IDEAL})


def _slowed(side: Side, name: str) -> Side:
    """With the last rank slowed down; one worker alone is not."""

    def run(seconds: float) -> Rate:
        if name != "one worker":
            os.environ["MANYHANDS_SLOW"] = f"{SLOWER:g}@{2 if name == 'server' else 1}"
        try:
            return side(seconds)
        finally:
            os.environ.pop("MANYHANDS_SLOW", None)

    return run


def to_target(task: str, workers: tuple[int, ...], seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """Samples, training seconds and staleness until the target, for every strategy and number of workers."""
    cells: list[tuple[str, int, dict[str, Any]]] = [("single", 1, {})] + [
        (name, count, settings) for name, settings in _to_compare().items() for count in workers
    ]
    rows = []
    for name, count, settings in cells:
        for seed in seeds:
            cell: dict[str, Any] = {"strategy": name, "workers": count, "seed": seed}
            try:
                record = _train_to_target(task, count, seed, settings)
            except DivergedError as error:
                rows.append({**cell, "diverged": str(error)})
            else:
                rows.append(
                    {
                        **cell,
                        "samples": record.target_samples,
                        "seconds": record.target_seconds,
                        "rate": record.samples_per_second,
                        "staleness": record.mean_staleness,
                        "most": max(record.staleness, default=None),
                        "best": record.best_metric,
                    }
                )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _train_to_target(task: str, workers: int, seed: int, settings: dict[str, Any]) -> mh.RunRecord:
    with tempfile.TemporaryDirectory() as folder:
        return mh.train(
            task,
            workers=workers,
            threads=1,
            seed=seed,
            stop_at_target=True,
            evaluate_every=0.1,
            checkpoint_every=1e6,
            quiet=True,
            out=Path(folder) / "run",
            **settings,
        )


def _to_compare() -> dict[str, dict[str, Any]]:
    return {
        "allreduce": {"strategy": "allreduce"},
        "average": {"strategy": "average"},
        "server": {"strategy": "server"},
        "hogwild": {"strategy": "hogwild"},
    }


def show(rows: list[Row]) -> None:
    """For people."""
    heads = f"{'samples/s':>10}{'updates/s':>10}{'best':>8}{'median':>8}{'wanted':>9}"
    print(f"{'task':<16}{'side':<18}{heads}  staleness")
    for row in rows:
        wanted = f">= {row.wanted:g}" if row.wanted is not None else ""
        print(
            f"{row.task:<16}{row.side:<18}{row.samples_per_second:>10,.0f}{row.updates_per_second:>10,.1f}"
            f"{row.best:>7.2f}x{row.median:>7.2f}x{wanted:>9}  {histogram(row.staleness)}",
            flush=True,
        )


def histogram(staleness: dict[int, int]) -> str:
    """`0: 3 %, 1: 95 %, 2: 2 %`."""
    total = sum(staleness.values())
    shares = [(stale, count / total) for stale, count in sorted(staleness.items())]
    return ", ".join(f"{stale}: {share:.0%}" for stale, share in shares if share >= 0.005)


def main() -> None:
    """Run what was asked for and print it."""
    parser = argparse.ArgumentParser(description="Asynchronous strategies, side by side.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long a round of one side takes")
    parser.add_argument("--only", choices=TASKS, help="one task")
    parser.add_argument("--sides", help="some of them only, e.g. 'hogwild,hogwild by hand'")
    parser.add_argument("--straggler", action="store_true", help="one worker is four times slower")
    parser.add_argument("--svg", type=Path, help="draw the straggler's table into this file")
    parser.add_argument("--target", action="store_true", help="mnist-cnn to its target at 1, 2 and 4 workers")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    if arguments.target:
        to_target("mnist-cnn", (1, 2, 4), (0,))
        return
    tasks = [arguments.only] if arguments.only else list(TASKS)
    rows = []
    for task in tasks[:1] if arguments.straggler else tasks:
        if arguments.straggler:
            found = straggler(task, arguments.rounds, arguments.seconds)
        else:
            chosen = all_sides(task)
            if arguments.sides:
                names = ["one worker", *arguments.sides.split(",")]
                chosen = {name: side for name, side in chosen.items() if name in names}
            rates = interleaved(chosen, arguments.rounds, arguments.seconds)
            found = table(task, rates, WANTED if task == "mnist-cnn" else {})
        rows += found
        if not arguments.json:
            show(found)
    if arguments.json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
    if arguments.svg is not None:
        bars = [(row.side, row.median) for row in rows]
        title = f"{rows[0].task}: two workers, one of them {SLOWER:g} times slower"
        arguments.svg.write_text(chart.bars(title, "times one worker's samples/s", bars, IDEAL))


if __name__ == "__main__":
    main()
