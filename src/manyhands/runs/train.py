"""`train`, `run` and `resume_folder`: from settings or a spec to a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from manyhands.callbacks.background import BackgroundCallbacks
from manyhands.callbacks.base import Callback, StepFunction
from manyhands.core import environment, formatting, registry
from manyhands.core.atomic_files import usable
from manyhands.core.errors import UsageError, kind_of
from manyhands.core.registry import launchers, strategies
from manyhands.records.record import RunRecord, StepRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.records.trust import check_trust
from manyhands.records.user_names import is_brought
from manyhands.runs import folders, instruction_limit
from manyhands.runs.checks import check, check_system
from manyhands.runs.defaults import fill_in, fill_in_resumed, joins, leads
from manyhands.runs.execution import execute, follow, launcher_of
from manyhands.runs.settings import Settings
from manyhands.tasks import TASKS

if TYPE_CHECKING:
    from manyhands.tasks.base import Task

AUTO = "auto"  # the number of workers that is measured to be the fastest


def train(
    task: str | Task | Callable[..., Task],
    *,
    lr: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    allow_changes: bool = False,
    trust: bool = False,
    quiet: bool = False,
    track: Sequence[str] = (),
    callbacks: Sequence[Callback | Callable[[StepRecord], Any]] = (),
    **settings: Unpack[Settings],
) -> RunRecord:
    """Train a task and return its record; every setting is a field of RunSpec, or an option of the strategy.

    >>> run = train("mnist-cnn", batch=256, epochs=3, lr=0.1, options={"width": 2})
    >>> run.metric, run.samples_per_second

    A task is a name, `FILE.py:NAME`, an `mh.Task`, or a function that returns one. With `resume`, `task` may
    be the folder of a run: settings that are not given stay as they were. A task file that such a folder
    names is imported only if this account started the run, or with `trust`. A callback is an `mh.Callback`,
    or a function that is called with each step; it may return "stop". `recipe` may be a function
    (named_parameters, batch) that returns a torch.optim.Optimizer, and `lr_schedule` one from samples seen to
    a learning rate.
    """
    from manyhands.callbacks import progress, tracking

    chosen = with_strategy_options(with_lr(given(settings), lr))
    task = named(task)
    heard: list[Callback] = [Callback() if quiet or not leads() else progress.for_people()]
    heard += [tracking.member(name) for name in track if leads()]
    heard += [as_callback(each) for each in callbacks if leads()]
    with BackgroundCallbacks(heard) as background:
        if resume and task not in TASKS and ".py" not in task and not is_brought(task):
            return resume_folder(
                Path(task), chosen, allow_changes=allow_changes, trust=trust, callbacks=background
            )
        known = resume and out is not None and is_brought(task) and not allow_changes
        if known and out is not None and RunFolder(Path(out)).exists():
            return resume_folder(
                Path(out),
                {**chosen, "task": task},
                allow_changes=allow_changes,
                trust=trust,
                callbacks=background,
            )
        if chosen.get("workers") == AUTO:
            spec = _fastest(task, chosen, background)
        else:
            spec = RunSpec.of(task=task, **fill_in(chosen))
        folder = Path(out) if out else None
        return run(spec, out=folder, resume=resume, allow_changes=allow_changes, callbacks=background)


def run(
    spec: RunSpec,
    *,
    out: Path | None = None,
    resume: bool = False,
    allow_changes: bool = False,
    callbacks: Sequence[Callback] | BackgroundCallbacks = (),
    gate: Path | None = None,
) -> RunRecord:
    """Run a spec in its own folder, or continue it there, and return the record.

    Callbacks are called in their own threads; none of them can end the run (law 12). With the file of a
    `gate` (core/pause_gate.py), the workers pause where its owner lets them.
    """
    if out is not None:
        usable(out)
    check(spec)
    with BackgroundCallbacks.of(callbacks) as background:
        background.on_waiting(_starting(spec))
        spec = instruction_limit.prepare(spec, background.on_notice)
        launcher = launcher_of(spec)
        from manyhands.runs.resolve import examined, resolve

        spec = resolve(spec)
        if not launcher.leads:
            return follow(spec, launcher)
        for note in examined(spec).notes:
            background.on_notice(note)
        folder = RunFolder(folders.choose(spec, out, resume))
        if resume and out is None and not folder.exists():
            background.on_notice(
                f"{folders.RUNS} has no run with exactly these settings to resume: starting {folder.path}"
            )
        return execute(spec, launcher, folder, resume and folder.exists(), allow_changes, background, gate)


def resume_folder(
    path: Path,
    settings: dict[str, Any],
    *,
    allow_changes: bool = False,
    trust: bool = False,
    callbacks: Sequence[Callback] | BackgroundCallbacks = (),
) -> RunRecord:
    """Continue the run in a folder, with the given settings in place of the stored ones."""
    folder = RunFolder(usable(path))
    stored, signed = folder.spec_and_signature()
    if settings.get("workers") == AUTO:
        raise UsageError(
            f"workers auto is for new runs; give a number of workers to continue {path} (it had "
            f"{stored.workers})"
        )
    task_options = {**stored.options, **settings.get("options", {})}
    recipe_options = {**stored.recipe_options, **settings.get("recipe_options", {})}
    settings = {
        **fill_in_resumed(stored, settings),
        "options": task_options,
        "recipe_options": recipe_options,
    }
    spec = stored.replace(**settings)
    check(spec)
    with BackgroundCallbacks.of(callbacks) as background:
        if leads():
            check_trust(folder, stored, signed or trust, background.on_notice)
        background.on_waiting(_starting(spec))
        spec = instruction_limit.prepare(spec, background.on_notice)
        launcher = launcher_of(spec)
        if not launcher.leads and spec.user_files:  # rank 0 decides whether they are imported
            return follow(spec, launcher)
        from manyhands.runs.resolve import resolve

        spec = resolve(spec)
        if not launcher.leads:
            return follow(spec, launcher)
        record = execute(spec, launcher, folder, True, allow_changes, background)
    if trust and not signed:
        folder.sign()
    return record


def given(settings: Settings) -> dict[str, Any]:
    """The settings that are not None, which leaves one to the task or at its default.

    A recipe or a schedule that is a function gets the name that a spec has for it.
    """
    found = {name: value for name, value in settings.items() if value is not None}
    for name in ("recipe", "lr_schedule"):
        if name in found and not isinstance(found[name], str):
            from manyhands.tasks import brought

            found[name] = brought.bring_function(found[name], name)  # type: ignore[arg-type]
    return found


def named(task: str | Task | Callable[..., Task]) -> str:
    """The name that a spec has for a task."""
    if isinstance(task, str):
        return task
    from manyhands.tasks import brought

    return brought.bring(task)


def as_callback(given: Callback | Callable[[StepRecord], Any]) -> Callback:
    """A callback, or a function that is called with each step as one."""
    if isinstance(given, Callback):
        return given
    if isinstance(given, type) or not callable(given):
        kind = f"the class {given.__name__}" if isinstance(given, type) else kind_of(given)
        own = isinstance(given, type) and issubclass(given, Callback)
        instead = f": use {given.__name__}()" if own else ""
        raise UsageError(f"a callback is an mh.Callback or a function of a step, not {kind}{instead}")
    return StepFunction(given)


def with_strategy_options(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with options of the strategy, such as `every=4`, where a spec has them."""
    known = {name for row in strategies.STRATEGIES.values() for name in registry.options(row.options)}
    own = {name: value for name, value in settings.items() if name in known - set(RunSpec.model_fields)}
    if not own:
        return settings
    rest = {name: value for name, value in settings.items() if name not in own}
    return {**rest, "strategy_options": {**rest.get("strategy_options", {}), **own}}


def with_lr(settings: dict[str, Any], lr: float | None) -> dict[str, Any]:
    """Return the settings with `lr` as the recipe's option of that name."""
    if lr is None:
        return settings
    return {**settings, "recipe_options": {**settings.get("recipe_options", {}), "lr": lr}}


def _starting(spec: RunSpec) -> str:
    """What a person reads within half a second, before torch is imported and the data are read."""
    servers = f" and {formatting.plural(spec.servers, 'server')}" if spec.servers else ""
    verb = "waiting for" if joins(spec.launcher) else "starting"
    return f"{verb} {formatting.plural(spec.workers, 'worker')}{servers} for {spec.task} ..."


def _fastest(task: str, settings: dict[str, Any], callbacks: BackgroundCallbacks) -> RunSpec:
    """Return the spec with the workers and threads that are measured to be the fastest on this machine."""
    filled = fill_in({**settings, "workers": None})
    if joins(filled["launcher"]):
        raise UsageError("workers auto chooses how many to start, but they have been started already")
    spec = RunSpec.of(task=task, **filled)
    can = strategies.having("autotuned")
    if spec.strategy in strategies.STRATEGIES and spec.strategy not in can:
        raise UsageError(f"workers auto chooses between {' and '.join(can)}, not {spec.strategy}")
    check(spec)
    check_system(launchers.LOCAL)
    spec = instruction_limit.prepare(spec.alone(), callbacks.on_notice).alone()
    callbacks.on_waiting(f"measuring how to use {formatting.plural(environment.cores(), 'core')} ...")
    launcher_of(spec.replace(launcher=launchers.LOCAL))
    from manyhands.runs import autotune
    from manyhands.runs.resolve import resolve
    from manyhands.tasks import find

    spec = resolve(spec)
    return autotune.choose(spec, find.build(spec.task, spec.options).unit, callbacks.on_notice)
