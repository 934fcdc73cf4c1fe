"""Two workers against one, against DDP, and against one worker that uses all cores as threads.

    python benchmarks/data_parallel/run.py [--rounds 5] [--seconds 2] [--only mlp:32] [--json]

Workers have one thread each. Every round runs all sides of a case in turn, each first in one of them; the
rate of a side is that of its best round (median step, the first steps left out), and `median` is the median
over rounds of ours / theirs. Sides marked `kept` keep freed memory in the process as ours does; the others
are what one would write by hand. `--crowded` shows 2, 3 and 4 workers instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import sides

from manyhands.core import environment
from manyhands.launchers.base import SupervisionOptions
from manyhands.launchers.local import LocalLauncher
from manyhands.launchers.mpi import MpiLauncher

WARM_UP = 4  # steps


class Case(NamedTuple):
    """A network, its batch per worker, about how many samples/s one worker makes, and the goals."""

    task: str
    batch: int
    rate: int
    of_bare: float | None = None
    of_ddp: float | None = None
    of_threads: float | None = None


CASES = [
    Case("mlp", 32, 6_000, 1.4, 2.5),
    Case("mlp", 128, 8_500, 1.85, 1.5, 0.95),
    Case("cnn", 32, 950, 1.85, 1.15),
    Case("cnn", 128, 950, 1.9, 1.05, 1.2),
    Case("big", 128, 800),
]


class Row(NamedTuple):
    """One side of a case: samples/s of its best round, and ours against it, best and median of rounds."""

    task: str
    batch: int  # per worker; the global batch is twice that
    side: str
    samples_per_second: float
    ours: float
    median: float
    wanted: float | None


Side = Callable[[int], list[float]]  # steps -> seconds of each


def all_sides(case: Case, folder: Path) -> dict[str, tuple[int, Side]]:
    """The sides by name: samples per step, and the function that makes that many steps."""
    local, cores = LocalLauncher(), environment.cores()

    def ours(steps: int) -> list[float]:
        with tempfile.TemporaryDirectory(dir=folder) as room:
            return sides.ours(case.task, case.batch, steps, 2, 1, Path(room))

    def peer(function: Callable[..., Any], workers: int, batch: int, threads: int, kept: bool) -> Side:
        def side(steps: int) -> list[float]:
            times: list[float] = local.launch(
                function, workers, case.task, batch, steps, threads, kept, supervision=SupervisionOptions()
            )[0]
            return times

        return side

    found: dict[str, tuple[int, Side]] = {"ours": (2 * case.batch, ours)}
    for kept, mark in ((False, ""), (True, " kept")):
        found["bare loop" + mark] = case.batch, peer(sides.bare, 1, case.batch, 1, kept)
        found["all threads" + mark] = 2 * case.batch, peer(sides.bare, 1, 2 * case.batch, cores, kept)
        found["ddp gloo" + mark] = 2 * case.batch, peer(sides.ddp, 2, case.batch, 1, kept)
    if find_spec("horovod") is not None:
        local_mpi = MpiLauncher()

        def horovod(steps: int) -> list[float]:
            times: list[float] = local_mpi.launch(sides.horovod, 2, case.task, case.batch, steps, 1, True)[0]
            return times

        found["horovod"] = 2 * case.batch, horovod
    return found


def interleaved(
    found: dict[str, tuple[int, Side]], rate: int, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Samples a second of each side in each round."""
    rates: dict[str, list[float]] = {name: [] for name in found}
    order, least = deque(found), min(samples for samples, _ in found.values())
    for _ in range(rounds):
        for name in order:
            samples, side = found[name]
            steps = WARM_UP + max(8, round(seconds * rate / least))
            rates[name].append(samples / statistics.median(side(steps)[WARM_UP:]))
        order.rotate(1)
    return rates


def measure(case: Case, rounds: int, seconds: float, folder: Path) -> list[Row]:
    """One case: one row per side."""
    rates = interleaved(all_sides(case, folder), case.rate, rounds, seconds)
    wanted = {"bare loop": case.of_bare, "ddp gloo": case.of_ddp, "all threads": case.of_threads}
    rows = []
    for name, theirs in rates.items():
        ratios = [mine / other for mine, other in zip(rates["ours"], theirs, strict=True)]
        best = max(rates["ours"]) / max(theirs)
        rows.append(
            Row(case.task, case.batch, name, max(theirs), best, statistics.median(ratios), wanted.get(name))
        )
    return rows


def crowded(rounds: int, seconds: float, folder: Path) -> list[Row]:
    """More workers than cores, relative to two workers: with the same batch per worker, or in all."""
    rows = []
    for task, rate, each in (("mlp", 8_500, 128), ("mlp", 8_500, 0), ("cnn", 950, 128), ("cnn", 950, 0)):

        def several(workers: int, task: str = task, each: int = each) -> tuple[int, Side]:
            share = each or 240 // workers

            def side(steps: int) -> list[float]:
                with tempfile.TemporaryDirectory(dir=folder) as room:
                    return sides.ours(task, share, steps, workers, 1, Path(room))

            return share * workers, side

        found = {f"{workers} x {each or 240 // workers}": several(workers) for workers in (2, 3, 4)}
        rates = interleaved(found, 2 * rate, rounds, seconds)
        two = next(iter(rates.values()))
        for name, theirs in rates.items():
            ratios = [mine / other for mine, other in zip(theirs, two, strict=True)]
            best = max(theirs) / max(two)
            rows.append(Row(task, found[name][0], name, max(theirs), best, statistics.median(ratios), 0.85))
    return rows


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description="Data parallelism, side by side.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long a round of one side takes")
    parser.add_argument("--only", help="one case, e.g. mlp:32")
    parser.add_argument("--crowded", action="store_true", help="2, 3 and 4 workers instead")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only in (None, f"{case.task}:{case.batch}")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.crowded:
            rows = crowded(arguments.rounds, arguments.seconds, folder)
            show("workers x batch per worker, relative to 2 workers", rows, arguments.json)
            return
        rows = []
        for case in cases:
            found = measure(case, arguments.rounds, arguments.seconds, folder)
            rows += found
            if not arguments.json:
                show("ours relative to each side" if case is cases[0] else None, found, False)
        if arguments.json:
            show(None, rows, True)


def show(title: str | None, rows: list[Row], as_json: bool) -> None:
    """A table, or JSON."""
    if as_json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
        return
    if title is not None:
        print(title)
        print(f"{'task':<6}{'batch':>6}  {'side':<16}{'samples/s':>10}{'best':>8}{'median':>8}{'wanted':>8}")
    for row in rows:
        wanted = f">= {row.wanted:g}" if row.wanted is not None else ""
        print(
            f"{row.task:<6}{row.batch:>6}  {row.side:<16}{row.samples_per_second:>10,.0f}{row.ours:>7.2f}x"
            f"{row.median:>7.2f}x{wanted:>8}",
            flush=True,
        )


if __name__ == "__main__":
    main()
