"""The commands that repeat a study or one of its runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from manyhands.records.record import RunRecord
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import Results

_FLAGS = (
    "strategy",
    "workers",
    "batch",
    "threads",
    "recipe",
    "epochs",
    "samples",
    "seconds",
    "target",
    "seed",
)


def train(record: RunRecord) -> str:
    """`manyhands train mnist-mlp --strategy allreduce --workers 2 --batch 256 ...`."""
    spec = record.spec
    usual = RunSpec(task=spec.task)
    words = ["manyhands", "train", spec.task]
    for name in _FLAGS:
        value = getattr(spec, name)
        if value is not None and value != getattr(usual, name):
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    for prefix, options in (
        ("", spec.options),
        ("recipe.", spec.recipe_options),
        ("strategy.", spec.strategy_options),
    ):
        words += _set(prefix, options)
    if spec.accumulate > 1:
        words += ["--accumulate", str(spec.accumulate)]
    return shlex.join(words)


def _set(prefix: str, options: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in options.items():
        plain = str(value).lower() if isinstance(value, bool) else str(value)
        words += ["--set", f"{prefix}{name}={plain}"]
    return words


def study(results: Results) -> str | None:
    """The command that ran the study, if there was one."""
    return shlex.join(results.command) if results.command else None


def report(results: Results) -> str:
    """The command that creates the report again."""
    return shlex.join(["manyhands", "report", str(results.folder)])
