"""One run of one cell in a folder of its own: begun, gone on with or found finished; only numbers stay."""

from __future__ import annotations

import shutil
from pathlib import Path

from manyhands.errors import DivergedError, UsageError
from manyhands.folder import RunFolder
from manyhands.progress import Silent
from manyhands.record import Observer, RunRecord
from manyhands.run import run
from manyhands.spec import RunSpec

SETTLED = ("finished", "target", "diverged")  # a run that diverged is a result: it would diverge again


class CannotWorkError(UsageError):
    """A combination that its task's data or model rule out."""


def checked(spec: RunSpec) -> RunSpec:
    """The spec with nothing left open; the task that this builds is kept for its run."""
    from manyhands.resolve import resolve

    try:
        return resolve(spec)
    except UsageError as error:
        raise CannotWorkError(str(error)) from None


def attempt(spec: RunSpec, path: Path, observer: Observer) -> RunRecord:
    """Run a spec in this folder, or go on there with what a study that was stopped has left."""
    resolved = checked(spec)
    folder = RunFolder(path)
    if path.exists() and (not folder.exists() or folder.spec().differences(resolved)):
        shutil.rmtree(path)  # killed before it began, or begun by a version with other defaults
    record = folder.record()
    if record is not None and record.status in SETTLED:
        return record
    try:
        return run(spec, out=path, resume=True, observers=[observer])
    except DivergedError:
        record = folder.record()
        assert record is not None
        return record


def attempt_quietly(spec: RunSpec, path: Path) -> RunRecord:
    """The same in a process of a pool."""
    return attempt(spec, path, Silent())


def tidy(path: Path) -> None:
    """Delete what nobody reads of a cell that is finished: a study of a large model would fill the disk."""
    folder = RunFolder(path)
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    folder.model.unlink(missing_ok=True)
