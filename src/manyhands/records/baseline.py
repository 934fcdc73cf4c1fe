"""What earlier runs say about this one: how fast one worker was."""

from __future__ import annotations

from pathlib import Path

from manyhands.core.errors import ManyhandsError
from manyhands.records.record import OneWorker, RunRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec

_SAME = ("task", "options", "dtype", "device")  # what a rate must share to be compared with
_MOST = 30  # results that are read: a start must not take longer with every run that was made


def one_worker(runs: Path, spec: RunSpec, threads: int) -> OneWorker | None:
    """The rate of the last run like this with one worker, the same threads preferred; or None."""
    if spec.workers == 1:
        return None
    best: RunRecord | None = None
    for folder in _likeliest(runs, spec)[:_MOST]:
        record = _record(folder)
        if record is None or not _alike(record, spec):
            continue
        if record.environment.threads == threads:
            best = record
            break
        best = best or record
    return None if best is None else OneWorker(best.samples_per_second, best.environment.threads)


def _likeliest(runs: Path, spec: RunSpec) -> list[Path]:
    """The folders here, those that are named after the task before others, the latest result first."""
    stem, found = spec.name.removesuffix(spec.id), list[tuple[bool, float, Path]]()
    try:
        for folder in runs.iterdir():
            try:
                written = (folder / "result.json").stat().st_mtime
            except OSError:
                continue  # it has none
            found.append((folder.name.startswith(stem), written, folder))
    except OSError:
        return []  # nothing was run here yet
    return [folder for *_, folder in sorted(found, reverse=True)]


def _record(folder: Path) -> RunRecord | None:
    try:
        return RunFolder(folder).record()
    except (ManyhandsError, OSError, RecursionError):
        return None  # whatever else lies there is not ours to judge


def _alike(record: RunRecord, spec: RunSpec) -> bool:
    settled = record.status in ("finished", "target") and record.steps >= 20
    same = all(getattr(record.spec, name) == getattr(spec, name) for name in _SAME)
    return settled and same and record.spec.workers == 1
