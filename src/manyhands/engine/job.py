"""What a worker is told to do: one picklable value, so that any launcher can send it anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manyhands.records.record import OneWorker
from manyhands.records.spec import RunSpec


@dataclass(frozen=True)
class Job:
    """What a worker is told: a resolved spec, the run's folder, and whether to go on from a checkpoint."""

    spec: RunSpec
    folder: Path
    resume: bool = False
    accept: frozenset[str] = frozenset()  # ids of other specs whose checkpoints are welcome
    attempt: int = 0  # how often this run was started again after a worker failed
    one_worker: OneWorker | None = None  # the last such run of this task, to compare speeds with
