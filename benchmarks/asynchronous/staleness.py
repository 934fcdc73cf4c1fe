"""Plain asynchronous SGD at growing staleness, and with the rate divided by it (arXiv 1511.05950).

    python benchmarks/asynchronous/staleness.py [--json]

Workers of a parameter server take turns by script: every gradient is of parameters as they were workers - 1
updates ago: exactly the same numbers on every machine. The task is the quadratic with a stiffness of at most
1, where a gradient that is t updates old is stable at rates below 2 sin(pi / (4 t + 2)).
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import numpy as np

from manyhands.recipes.members import constant
from manyhands.records.spec import RunSpec
from manyhands.strategies.asynchronous.parameter_server import server
from manyhands.tasks.quadratic import points, quadratic, stiffness
from manyhands.testing.scripted import Turn, play

SAMPLES, DIMENSIONS, CONDITION, EPOCHS, LR = 48, 3, 10.0, 10, 0.4


def excess(workers: int, aware: bool) -> float:
    """How far the loss is above its minimum at the end, as a share of where it began."""
    spec = RunSpec(
        task="quadratic",
        strategy="server",
        strategy_options={"staleness_aware": aware},
        workers=workers,
        batch=workers,
        epochs=EPOCHS,
        target=0.0,
        evaluate_every=100,
    )
    turns: list[Turn] = [(1 + number, "start") for number in range(workers)]
    turns += [(1 + number % workers, "forward") for number in range(EPOCHS * SAMPLES)]
    task = quadratic(n=SAMPLES, dimensions=DIMENSIONS, condition=CONDITION)
    weight = play(server, task, constant(lr=LR), spec, turns).state["model/weight"].numpy()
    best, h = points(SAMPLES, DIMENSIONS).mean(axis=0), stiffness(DIMENSIONS, CONDITION)
    return float((h * (weight - best) ** 2).sum() / (h * best**2).sum())


def rows() -> list[dict[str, Any]]:
    """One row a staleness."""
    found = []
    for workers in (1, 2, 4, 8, 16):
        stale = workers - 1
        limit = 2 * math.sin(math.pi / (4 * stale + 2))
        plain, aware = excess(workers, aware=False), excess(workers, aware=True)
        found.append({"staleness": stale, "limit": limit, "plain": plain, "aware": aware})
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Staleness, and the rate divided by it.")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    if parser.parse_args().json:
        print(json.dumps(rows(), indent=2))
        return
    print(f"rate {LR:g}, excess loss after {EPOCHS} epochs as a share of that before the first")
    print(f"{'staleness':>9}{'stable below':>14}{'plain':>12}{'rate / staleness':>18}")
    for row in rows():
        print(
            f"{row['staleness']:>9}{row['limit']:>14.3f}{row['plain']:>12.3g}{row['aware']:>18.3g}",
            flush=True,
        )


if __name__ == "__main__":
    np.seterr(over="ignore")
    main()
