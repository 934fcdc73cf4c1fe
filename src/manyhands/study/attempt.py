"""One run of a cell in its own folder: started, resumed or found finished; only its numbers are kept."""

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
    """Raised for settings that cannot work with the task's data or model."""


def ruled_out(spec: RunSpec) -> str | None:
    """Return why a spec cannot work with its task's data or model; the built task is kept for the run."""
    from manyhands.runs.resolve import resolve

    try:
        resolve(spec)
    except UsageError as error:
        return str(error)
    except Exception:  # noqa: BLE001 (a task's own code may raise anything: the run raises it again)
        return None
    return None


def is_settled(path: Path) -> bool:
    """Whether the run in this folder has ended, so that it is not run again."""
    record = _record(RunFolder(path))
    return record is not None and record.status in SETTLED


def attempt(spec: RunSpec, path: Path, callback: Callback, gate: Path | None = None) -> RunRecord:
    """Run a spec in this folder, or resume the run that a stopped study has left there."""
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
    if path.exists() and not _can_resume(folder, resolved):
        shutil.rmtree(path)
    try:
        return run(spec, out=path, resume=True, callbacks=[callback], gate=gate)
    except DivergedError:
        record = folder.record()
        assert record is not None
        return record


def _record(folder: RunFolder) -> RunRecord | None:
    """The record of the run; None if it is missing or damaged, so that the cell is run again."""
    try:
        return folder.record()
    except ManyhandsError:
        return None


def _can_resume(folder: RunFolder, resolved: RunSpec) -> bool:
    """False if it was killed before it began, was tidied, or was begun by a version with other defaults."""
    return folder.exists() and folder.checkpoints.is_dir() and not folder.spec().differences(resolved)


def in_own_process(spec: RunSpec) -> RunSpec:
    """Return the spec with even one worker in its own process: its memory peak and allocator are its own."""
    return spec.replace(launcher=LOCAL) if LAUNCHERS[spec.launcher].in_process else spec


def attempt_quietly(spec: RunSpec, path: Path) -> RunRecord:
    """Run a spec like `attempt`, without output, in a process of a pool."""
    return attempt(spec, path, Callback())


def tidy(path: Path) -> None:
    """Delete the checkpoints, logs and model of a finished cell: large models would fill the disk."""
    if path.is_symlink():  # the folder that it points to is not ours
        return
    folder = RunFolder(path)
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    shutil.rmtree(path / "logs", ignore_errors=True)
    folder.model.unlink(missing_ok=True)
