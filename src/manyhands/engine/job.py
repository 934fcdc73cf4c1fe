"""The job of a worker: one picklable value, so that any launcher can send it anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manyhands.records.record import OneWorker
from manyhands.records.spec import RunSpec


@dataclass(frozen=True)
class Job:
    """A resolved spec, the run's folder, and whether to resume from a checkpoint."""

    spec: RunSpec
    folder: Path
    resume: bool = False
    accept: frozenset[str] = frozenset()  # ids of other specs whose checkpoints are accepted
    attempt: int = 0  # how many times the run was restarted after a worker failed
    one_worker: OneWorker | None = None  # an earlier run of this task, to compare speeds with
    gate: Path | None = None  # the file of a gate at which the workers pause, if speed is measured in blocks
