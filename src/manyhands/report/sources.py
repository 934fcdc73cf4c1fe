"""What a report is drawn from: a study, any folder of runs, or the folder of one run."""

from __future__ import annotations

from pathlib import Path

from manyhands.core.errors import UsageError
from manyhands.records.run_folder import RunFolder
from manyhands.records.study_results import Results, StudyFolder


def read(path: Path) -> Results:
    """The results in a folder; one run is read as a study of its own."""
    folder = RunFolder(path)
    if not folder.exists():
        return StudyFolder(path).read()
    record = folder.record()
    if record is None:
        raise UsageError(f"{path} has no result yet; continue it with: manyhands train --resume {path}")
    name = path.resolve().name
    return Results(path, name, name, records=[record.model_copy(update={"run": str(path)})])
