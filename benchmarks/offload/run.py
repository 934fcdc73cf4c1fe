"""Less memory for activations, and what it costs: VGG-19 with everything that spares memory, side by side.

    python benchmarks/offload/run.py [--batch 32] [--size 64] [--threads 2] [--rounds 3] [--svg FILE]
    python benchmarks/offload/run.py --only plain auto [--json]

Every side is a fresh process that holds parameters, gradients and momentum before the first step; they make
steps in turn, a round after the other. `activations` is counted (side.py: Counter) in a step that is not
timed; `peak` is the process's peak resident memory in a step above what it held before it; `time` is the
median over rounds of a side's seconds by those of `plain, kept` in the same round, which is how the trainer
runs without offload; `CPU` the seconds of all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import chart

from manyhands.core import formatting

HERE = Path(__file__).parent
LESS, MORE = 0.2, 1.25  # of the activations, of the time: what `auto` must reach
BUDGETS = (0.85, 0.7, 0.55)  # of plain's peak above what is held before
OURS = ("all", "conv", "auto")
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
SIDES = ("plain", "plain, kept", "checkpoint", "save_on_cpu", "all", "conv", "auto")


class Row(NamedTuple):
    """One side."""

    side: str
    activations: int  # bytes, counted
    activations_of_plain: float
    peak: int  # bytes of resident memory
    peak_of_plain: float
    seconds: float  # the best round
    time_of_kept: float  # the median, against plain as the trainer runs it
    cpu_of_kept: float  # seconds of all threads, the least of all rounds
    choices: dict[str, Any]


class Side:
    """A process that makes a step when asked."""

    def __init__(self, name: str, arguments: argparse.Namespace, room: int | None = None) -> None:
        self.name = name if room is None else f"{name}, {formatting.size(room)}"
        numbers = [str(number) for number in (arguments.batch, arguments.size, arguments.threads)]
        more = [] if room is None else [str(room)]
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "side.py"), name, *numbers, *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(HUGE_PAGES if name in OURS else {})},  # as `manyhands train --offload` does
        )
        self.steps: list[dict[str, Any]] = []

    def ask(self, word: str) -> dict[str, Any]:
        """Have it make a step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """It goes when there is nothing more to read."""
        self._process.communicate()


def compare(arguments: argparse.Namespace) -> list[Row]:
    """All sides, in turn."""
    sides: list[Side] = []
    counted: dict[str, dict[str, Any]] = {}
    try:
        for name in [*dict.fromkeys(["plain", "plain, kept", *(arguments.only or SIDES)])]:
            sides.append(Side(name, arguments))
            counted[name] = sides[-1].ask("count")
        for share in () if arguments.only else BUDGETS:
            sides.append(Side("auto", arguments, int(share * counted["plain"]["peak"])))
            counted[sides[-1].name] = sides[-1].ask("count")
        for number in range(arguments.rounds):
            for place in range(len(sides)):
                side = sides[(place + number) % len(sides)]
                side.steps.append(side.ask("step"))
    finally:
        for side in sides:
            side.end()
    plain, rows = sides[0], []
    kept = next(side for side in sides if side.name == "plain, kept")
    for side in sides:
        peak = max(step["peak"] for step in side.steps)
        ratios = [mine["seconds"] / its["seconds"] for mine, its in zip(side.steps, kept.steps, strict=True)]
        activations = counted[side.name]["activations"]
        rows.append(
            Row(
                side.name,
                activations,
                activations / counted["plain"]["activations"],
                peak,
                peak / max(step["peak"] for step in plain.steps),
                min(step["seconds"] for step in side.steps),
                statistics.median(ratios),
                min(step["cpu"] for step in side.steps) / min(step["cpu"] for step in kept.steps),
                counted[side.name]["choices"],
            )
        )
    return rows


def show(rows: list[Row]) -> None:
    """As a table of the README."""
    print("| side | activations | of plain | peak | of plain | seconds per step | relative to kept | CPU |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        # memory that is kept from step to step was there before
        kept = row.side == "plain, kept"
        peak = "| | |" if kept else f"| {formatting.size(row.peak)} | {row.peak_of_plain:.2f} |"
        print(
            f"| {row.side} | {formatting.size(row.activations)} | {row.activations_of_plain:.2f} {peak} "
            f"{row.seconds:.2f} | {row.time_of_kept:.2f} | {row.cpu_of_kept:.2f} |"
        )
    auto = next((row for row in rows if row.side == "auto"), rows[0])
    reached = auto.activations_of_plain <= LESS and auto.time_of_kept <= MORE
    print(
        f"\nauto: {formatting.percent(1 - auto.activations_of_plain)} less activation memory at "
        f"{formatting.percent(auto.time_of_kept - 1)} more time (wanted: 80 % at 25 %): "
        f"{'reached' if reached else 'not reached'}"
    )
    for row in rows:
        if "units" in row.choices:
            print(f"{row.side}: {json.dumps(row.choices)}")


def main() -> None:
    """Parse, compare, print."""
    parser = argparse.ArgumentParser(description="Activation memory against time, side by side.")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=SIDES, help="these sides besides plain, and no budgets")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--svg", type=Path, help="draw memory against time into this file")
    arguments = parser.parse_args()
    rows = compare(arguments)
    if arguments.json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
    else:
        show(rows)
    if arguments.svg is not None:
        title = f"VGG-19, {arguments.size} x {arguments.size}, batch {arguments.batch}"
        points = [
            chart.Point(row.side, row.activations_of_plain, row.time_of_kept, row.side.startswith(OURS))
            for row in rows
        ]
        arguments.svg.write_text(chart.scatter(title, points))


if __name__ == "__main__":
    main()
