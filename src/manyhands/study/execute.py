"""Running a study: one cell after the other, so that no timed run shares the cores with another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from manyhands.errors import DataUnavailableError, DivergedError, InterruptedRunError, ManyhandsError
from manyhands.folder import RunFolder
from manyhands.record import Observer, RunRecord
from manyhands.run import run
from manyhands.spec import RunSpec
from manyhands.study.grid import Study


class Cell(NamedTuple):
    """One cell: what was asked for, and its record or why there is none."""

    spec: RunSpec
    record: RunRecord | None
    message: str | None = None


def execute(
    study: Study, out: Path, observer: Callable[[], Observer], say: Callable[[str], None]
) -> Iterator[Cell]:
    """Run the cells that have no result yet; a failed one is reported and the rest goes on."""
    missing: set[str] = set()
    for number, wanted in enumerate(study.cells, 1):
        spec = wanted
        if spec.task in missing and study.fallback:
            spec = wanted.replace(task=study.fallback, options={})
        say(f"\n[{number}/{len(study.cells)}] {title(spec)}")
        try:
            try:
                yield Cell(spec, _cell(spec, out, observer()))
            except DataUnavailableError as error:
                if not study.fallback or spec.task == study.fallback:
                    raise
                say(f"{error}\nusing {study.fallback} instead of {spec.task}")
                missing.add(spec.task)
                spec = wanted.replace(task=study.fallback, options={})
                yield Cell(spec, _cell(spec, out, observer()))
        except InterruptedRunError as error:
            how = "give the same command to go on with the study"
            raise InterruptedRunError(f"interrupted in cell {number}; {how}", error.signal_number) from error
        except ManyhandsError as error:
            say(f"failed: {error}")
            yield Cell(spec, None, str(error))


def title(spec: RunSpec) -> str:
    """A cell in a few words."""
    workers = f" · {spec.workers} workers" if spec.workers > 1 else ""
    return f"{spec.task} · {spec.strategy}{workers} · batch {spec.batch or 'of the task'} · seed {spec.seed}"


def _cell(spec: RunSpec, out: Path, observer: Observer) -> RunRecord:
    folder = RunFolder(out / spec.name)
    record = folder.record()
    if record is not None and record.status == "diverged":
        return record  # a result as good as any: it would diverge again
    # Named by the spec as it was asked for, so that the folder is found again without building the task.
    try:
        return run(spec, out=folder.path, resume=True, observers=[observer])
    except DivergedError as error:
        observer.notice(str(error))
        record = folder.record()
        assert record is not None
        return record
