"""The answer of a study in a few sentences: what to train with, what it brings, and where it stops to pay."""

from __future__ import annotations

from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.scaling import Point
from manyhands.analysis.target import ToTarget, to_target
from manyhands.results import Results


class Answer(NamedTuple):
    """For one task."""

    task: str
    text: str
    fastest: ToTarget | Point | None
    cheapest: ToTarget | Point | None
    lines: list[str]


def answers(results: Results) -> list[Answer]:
    """One for each task, in order of appearance."""
    found = []
    for task in groups.tasks(results.records):
        arrived = [each for each in to_target(groups.of_task(results.records, task)) if each.seconds]
        best = min(arrived, key=lambda each: each.best_seconds or 0.0, default=None)
        text = (
            f"for {task} on this machine train with {best.variant}." if best else f"for {task} no answer yet."
        )
        found.append(Answer(task, text, best, best, [text]))
    return found
