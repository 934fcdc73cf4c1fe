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
    "lr_schedule",
    "epochs",
    "samples",
    "seconds",
    "target",
    "patience",
    "init",
    "seed",
    "dtype",
    "precision",
    "offload",
)
_SWITCHES = ("drop_last", "sync_batchnorm", "compile")  # flags without a value


_LENGTH = ("epochs", "samples", "seconds", "target")


def train(record: RunRecord, learned: RunRecord | None = None) -> str:
    """`manyhands train mnist-mlp --strategy allreduce --workers 2 --batch 256 ...`.

    A run that was measured in blocks has no length of its own; `learned` is one that made its steps.
    """
    spec = record.spec
    usual = RunSpec(task=spec.task)
    until = learned.spec if learned else usual if record.paired else spec
    words = ["manyhands", "train", spec.task]
    for name in _FLAGS:
        value = getattr(until if name in _LENGTH else spec, name)
        if value is not None and value != getattr(usual, name):
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    for prefix, options in (
        ("", spec.options),
        ("recipe.", spec.recipe_options),
        ("strategy.", spec.strategy_options),
    ):
        words += _set(prefix, options)
    words += [f"--{name.replace('_', '-')}" for name in _SWITCHES if getattr(spec, name)]
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
