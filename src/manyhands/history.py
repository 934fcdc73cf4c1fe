"""What earlier runs say about this one: how fast one worker was."""

from __future__ import annotations

from pathlib import Path

from manyhands.errors import ManyhandsError
from manyhands.folder import RunFolder
from manyhands.record import OneWorker, RunRecord
from manyhands.spec import RunSpec

_SAME = ("task", "options", "dtype", "device")  # what a rate must share to be compared with


def one_worker(runs: Path, spec: RunSpec, threads: int) -> OneWorker | None:
    """The rate of the last run like this with one worker, the same threads preferred; or None."""
    if spec.workers == 1 or not runs.is_dir():
        return None
    found = [record for folder in runs.iterdir() if (record := _record(folder)) and _alike(record, spec)]
    if not found:
        return None
    best = max(found, key=lambda record: (record.environment.threads == threads, record.environment.started))
    return OneWorker(best.samples_per_second, best.environment.threads)


def _record(folder: Path) -> RunRecord | None:
    try:
        return RunFolder(folder).record()
    except (ManyhandsError, OSError):
        return None  # whatever else lies there is not ours to judge


def _alike(record: RunRecord, spec: RunSpec) -> bool:
    settled = record.status in ("finished", "target") and record.steps >= 20
    same = all(getattr(record.spec, name) == getattr(spec, name) for name in _SAME)
    return settled and same and record.spec.workers == 1
