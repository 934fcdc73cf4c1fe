"""The throughput of one worker, from an earlier run."""

from __future__ import annotations

from pathlib import Path

from manyhands.core.errors import ManyhandsError
from manyhands.records.record import OneWorker, RunRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec

_COMPARABLE = ("task", "options", "dtype", "device")  # must be equal in runs that are compared
_MAX_RESULTS = 30  # to read: starting a run must not take longer with every earlier run


def one_worker(runs: Path, spec: RunSpec, threads: int) -> OneWorker | None:
    """Return the latest comparable run of one worker, preferably with the same threads; or None."""
    if spec.workers == 1:
        return None
    best: RunRecord | None = None
    for folder in _candidates(runs, spec)[:_MAX_RESULTS]:
        record = _record(folder)
        if record is None or not _comparable(record, spec):
            continue
        if record.environment.threads == threads:
            best = record
            break
        best = best or record
    return None if best is None else OneWorker(best.samples_per_second, best.environment.threads)


def _candidates(runs: Path, spec: RunSpec) -> list[Path]:
    """Folders with a result: those named after the task first, then the latest first."""
    stem, found = spec.name.removesuffix(spec.id), list[tuple[bool, float, Path]]()
    try:
        for folder in runs.iterdir():
            try:
                written = (folder / "result.json").stat().st_mtime
            except OSError:
                continue  # no result
            found.append((folder.name.startswith(stem), written, folder))
    except OSError:
        return []  # no run yet
    return [folder for *_, folder in sorted(found, reverse=True)]


def _record(folder: Path) -> RunRecord | None:
    try:
        return RunFolder(folder).record()
    except (ManyhandsError, OSError, RecursionError):
        return None  # another kind of folder, or a damaged one


def _comparable(record: RunRecord, spec: RunSpec) -> bool:
    complete = record.status in ("finished", "target") and record.steps >= 20
    equal = all(getattr(record.spec, name) == getattr(spec, name) for name in _COMPARABLE)
    return complete and equal and record.spec.workers == 1
