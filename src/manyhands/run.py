"""RunSpec -> build -> launch -> RunRecord: the one place where the axes meet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from manyhands import axes
from manyhands.errors import UsageError, unknown
from manyhands.folder import RunFolder
from manyhands.launchers import LAUNCHERS
from manyhands.recipes import RECIPES
from manyhands.record import Observer, RunRecord
from manyhands.spec import RunSpec
from manyhands.strategies import STRATEGIES
from manyhands.tasks import TASKS
from manyhands.transports import TRANSPORTS

RUNS = Path("runs")


def train(
    task: str,
    *,
    lr: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    allow_changes: bool = False,
    quiet: bool = False,
    track: Sequence[str] = (),
    **settings: Any,
) -> RunRecord:
    """Train a task and return what came of it; every setting is a field of RunSpec.

    >>> run = train("mnist-cnn", batch=256, epochs=3, lr=0.1, options={"width": 2})
    >>> run.metric, run.samples_per_second

    With `resume`, `task` may be the folder of a run: what is not given stays as it was there.
    """
    from manyhands import progress, tracking

    settings = with_rate(settings, lr)
    observers: list[Observer] = [progress.Silent() if quiet else progress.for_people()]
    observers += [tracking.member(name) for name in track]
    if resume and task not in TASKS and ".py" not in task:
        return resume_folder(Path(task), settings, allow_changes=allow_changes, observers=observers)
    spec = RunSpec.of(task=task, **settings)
    return run(
        spec, out=Path(out) if out else None, resume=resume, allow_changes=allow_changes, observers=observers
    )


def with_rate(settings: dict[str, Any], lr: float | None) -> dict[str, Any]:
    """`lr` is short for the recipe's option of that name."""
    if lr is None:
        return settings
    return {**settings, "recipe_options": {**settings.get("recipe_options", {}), "lr": lr}}


def run(
    spec: RunSpec,
    *,
    out: Path | None = None,
    resume: bool = False,
    allow_changes: bool = False,
    observers: Sequence[Observer] = (),
) -> RunRecord:
    """Carry out a spec in a folder of its own (or continue it there) and return the record."""
    check(spec)
    from manyhands.resolve import resolve

    spec = resolve(spec)
    folder = RunFolder(_choose(spec, out, resume))
    if resume and out is None and not folder.exists():
        for observer in observers:
            observer.notice(f"{RUNS} has no run of just these settings to resume: starting {folder.path}")
    return _carry_out(spec, folder, resume and folder.exists(), allow_changes, observers)


def resume_folder(
    path: Path, settings: dict[str, Any], *, allow_changes: bool = False, observers: Sequence[Observer] = ()
) -> RunRecord:
    """Continue the run in a folder; settings that are given and differ are changes."""
    folder = RunFolder(path)
    stored = folder.spec()
    options = {**stored.options, **settings.get("options", {})}
    recipe_options = {**stored.recipe_options, **settings.get("recipe_options", {})}
    spec = stored.replace(**{**settings, "options": options, "recipe_options": recipe_options})
    check(spec)
    from manyhands.resolve import resolve

    return _carry_out(resolve(spec), folder, True, allow_changes, observers)


def check(spec: RunSpec) -> None:
    """Answer what can be known to be wrong before torch is even imported (law 10)."""
    if ".py" not in spec.task and spec.task not in TASKS:
        raise unknown("task", spec.task, TASKS)
    for what, axis, name in (
        ("recipe", RECIPES, spec.recipe),
        ("strategy", STRATEGIES, spec.strategy),
        ("transport", TRANSPORTS, spec.transport),
        ("launcher", LAUNCHERS, spec.launcher),
    ):
        if name is not None and name not in axis:
            raise unknown(what, name, axis)
    if spec.strategy == "single" and spec.workers != 1:
        raise UsageError(f"strategy single has one worker, but workers is {spec.workers}")


def _choose(spec: RunSpec, out: Path | None, resume: bool) -> Path:
    """The folder of a run: the user's, or runs/TASK-ID, numbered where that spec has been run before."""
    if out is not None:
        folder = RunFolder(out)
        if folder.exists() and not resume:
            held = folder.spec()
            raise UsageError(
                f"{out} already holds a run ({held.task}, {held.id}); continue it with --resume, "
                "or choose another --out"
            )
        if not folder.exists() and out.exists() and (not out.is_dir() or any(_visible(out))):
            raise UsageError(f"{out} is not an empty folder and holds no run; choose another --out")
        return out
    first = RUNS / spec.name
    numbered = itertools.chain([first], (first.with_name(f"{first.name}-{k}") for k in itertools.count(2)))
    taken = list(itertools.takewhile(lambda path: path.exists(), numbered))
    if resume and taken:
        return taken[-1]
    return first.with_name(f"{first.name}-{len(taken) + 1}") if taken else first


def _visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def _carry_out(
    spec: RunSpec, folder: RunFolder, resume: bool, allow_changes: bool, observers: Sequence[Observer]
) -> RunRecord:
    from manyhands.worker import Job, work

    with ExitStack() as stack:
        stack.enter_context(folder.claimed())
        for observer in observers:
            stack.callback(observer.close)
        accept = frozenset[str]()
        if resume:
            before = folder.spec()
            if changes := before.differences(spec):
                if not allow_changes:
                    raise UsageError(
                        f"{folder.path} was started with other settings ({'; '.join(changes)}); "
                        "go on all the same with --allow-changes"
                    )
                accept = frozenset({before.id})
            record = folder.record()
            if record is not None and record.status in ("finished", "target") and not changes:
                for observer in observers:
                    observer.notice(f"{folder.path} is already finished")
                    observer.ended(record)
                return record
        else:
            folder.create()
            folder.write_spec(spec)
        launcher = axes.member("launcher", LAUNCHERS, spec.launcher)()
        job = Job(spec, folder.path, resume, accept)
        records: list[RunRecord] = launcher.launch(work, spec.workers, job, list(observers))
        return records[0]
