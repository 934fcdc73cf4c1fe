"""The folder of a run: the user's own, or one under `runs` that is named after the spec."""

from __future__ import annotations

import itertools
from pathlib import Path

from manyhands.core.errors import UsageError
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec

RUNS = Path("runs")


def choose(spec: RunSpec, out: Path | None, resume: bool) -> Path:
    """Return the user's folder, or runs/TASK-ID, with a number if that spec has been run before."""
    if out is not None:
        folder = RunFolder(out)
        if folder.exists() and not resume:
            held = folder.spec()
            raise UsageError(
                f"{out} already holds a run ({held.task}, {held.id}); continue it with --resume, "
                "or choose another --out"
            )
        if not folder.exists() and out.exists() and (not out.is_dir() or any(_visible(out))):
            raise UsageError(f"{out} is neither empty nor a run folder; choose another --out")
        return out
    first, taken = RUNS / spec.name, _numbered(RUNS / spec.name)
    if resume and (there := taken or _numbered(RUNS / spec.old_name)):
        return there[-1]
    return first.with_name(f"{first.name}-{len(taken) + 1}") if taken else first


def _numbered(first: Path) -> list[Path]:
    """The existing folders of this name: itself, `...-2`, `...-3` and so on."""
    more = (first.with_name(f"{first.name}-{k}") for k in itertools.count(2))
    return list(itertools.takewhile(lambda path: path.exists(), itertools.chain([first], more)))


def _visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")]
