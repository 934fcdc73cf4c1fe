"""`mh.study`: run a study from Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.core import environment
from manyhands.core.atomic_files import usable
from manyhands.report.notebook import StudyResults
from manyhands.study import guarded, study_file, view
from manyhands.study.execute import execute


def study(
    file: str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    jobs: int | None = None,
    quiet: bool = False,
) -> StudyResults:
    """Run every cell of a study that has no result yet, and return its results.

    >>> study({"grid": [{"task": "digits-mlp", "strategy": "allreduce", "workers": [1, 2]}]}).answers

    `file` is a study file, the name of one, or what it would hold as a dict. Call it again to continue a
    study that was stopped.
    """
    if isinstance(file, Mapping):
        plan = study_file.of_dict(file, str(file.get("name", "study")))
    else:
        plan = study_file.read(study_file.find(str(file)))
    plan = study_file.with_baselines(plan)
    folder = usable(Path(out) if out is not None else Path("results") / plan.name)
    shown = view.NoView() if quiet else guarded.Guarded(view.for_people())
    results = execute(plan, folder, shown, min(plan.jobs, environment.cores()) if jobs is None else jobs)
    return StudyResults(results)
