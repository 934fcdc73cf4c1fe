"""One run of one cell in a folder of its own: begun, gone on with or found finished; only numbers stay."""

from __future__ import annotations

import shutil
from pathlib import Path

from manyhands.callbacks.base import Callback
from manyhands.core.errors import DivergedError, ManyhandsError, UsageError
from manyhands.core.registry.launchers import LAUNCHERS, LOCAL
from manyhands.records.record import RunRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.runs.train import run

SETTLED = ("finished", "target", "diverged")  # a run that diverged is a result: it would diverge again


class CannotWorkError(UsageError):
    """A combination that its task's data or model rule out."""


def ruled_out(spec: RunSpec) -> str | None:
    """Why its task's data or model rule a spec out; the task that this builds is kept for the run."""
    from manyhands.runs.resolve import resolve

    try:
        resolve(spec)
    except UsageError as error:
        return str(error)
    except Exception:  # noqa: BLE001 (a task's own code may raise anything: the run does so again)
        return None
    return None


def is_settled(path: Path) -> bool:
    """Whether the run in this folder has come to its end."""
    record = _record(RunFolder(path))
    return record is not None and record.status in SETTLED


def attempt(spec: RunSpec, path: Path, callback: Callback) -> RunRecord:
    """Run a spec in this folder, or go on there with what a study that was stopped has left."""
    from manyhands.runs.resolve import resolve

    try:
        resolved = resolve(spec)
    except UsageError as error:
        raise CannotWorkError(str(error)) from None
    folder = RunFolder(path)
    if path.is_symlink():
        raise UsageError(f"{path} is a link, and a study writes to its own folder only: remove it")
    record = _record(folder)
    if record is not None and is_settled(path):
        return record
    if path.exists() and not _can_go_on(folder, resolved):
        shutil.rmtree(path)
    try:
        return run(spec, out=path, resume=True, callbacks=[callback])
    except DivergedError:
        record = folder.record()
        assert record is not None
        return record


def _record(folder: RunFolder) -> RunRecord | None:
    """Its result; a damaged one is none, and the cell is run again."""
    try:
        return folder.record()
    except ManyhandsError:
        return None


def _can_go_on(folder: RunFolder, resolved: RunSpec) -> bool:
    """Not if it was killed before it began, tidied, or begun by a version with other defaults."""
    return folder.exists() and folder.checkpoints.is_dir() and not folder.spec().differences(resolved)


def apart(spec: RunSpec) -> RunSpec:
    """One worker in a process of its own too: the peak of its memory is its own, and so is its allocator."""
    return spec.replace(launcher=LOCAL) if LAUNCHERS[spec.launcher].in_process else spec


def attempt_quietly(spec: RunSpec, path: Path) -> RunRecord:
    """The same in a process of a pool, which is its own already."""
    return attempt(spec, path, Callback())


def tidy(path: Path) -> None:
    """Delete what nobody reads of a cell that is finished: a study of a large model would fill the disk."""
    if path.is_symlink():  # what lies elsewhere is somebody else's
        return
    folder = RunFolder(path)
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    shutil.rmtree(path / "logs", ignore_errors=True)
    folder.model.unlink(missing_ok=True)
