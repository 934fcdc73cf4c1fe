"""RunSpec -> build -> launch -> RunRecord: the one place where the axes meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.callbacks.background import BackgroundCallbacks
from manyhands.callbacks.base import Callback
from manyhands.core import allocator, environment, registry, tracebacks
from manyhands.core.atomic_files import usable
from manyhands.core.errors import ManyhandsError, UsageError, WorkerFailedError, unknown
from manyhands.engine.fault_injection import faults
from manyhands.launchers import LAUNCHERS
from manyhands.launchers.base import Launcher, SupervisionOptions
from manyhands.offload import scratch_file as offload_folder
from manyhands.recipes import RECIPES
from manyhands.records import baseline
from manyhands.records.record import RunRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.records.trust import result_of, say_if_unsigned, vouch
from manyhands.runs.defaults import arrange, check_arrangement, check_system, leads, rearrange
from manyhands.strategies import STRATEGIES, options
from manyhands.tasks import TASKS
from manyhands.transports import TRANSPORTS
from manyhands.transports.shm import leftovers

if TYPE_CHECKING:
    from manyhands.engine.job import Job

RUNS = Path("runs")


def train(
    task: str,
    *,
    lr: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    allow_changes: bool = False,
    trust: bool = False,
    quiet: bool = False,
    track: Sequence[str] = (),
    **settings: Any,
) -> RunRecord:
    """Train a task and return what came of it; every setting is a field of RunSpec.

    >>> run = train("mnist-cnn", batch=256, epochs=3, lr=0.1, options={"width": 2})
    >>> run.metric, run.samples_per_second

    With `resume`, `task` may be the folder of a run: what is not given stays as it was there. A task file
    that such a folder names is imported if this account has started the run, or with `trust`.
    """
    from manyhands.callbacks import progress, tracking

    settings = with_rate(settings, lr)
    callbacks: list[Callback] = [Callback() if quiet or not leads() else progress.for_people()]
    callbacks += [tracking.member(name) for name in track if leads()]
    with BackgroundCallbacks(callbacks) as followers:
        if resume and task not in TASKS and ".py" not in task:
            return resume_folder(
                Path(task), settings, allow_changes=allow_changes, trust=trust, callbacks=followers
            )
        if settings.get("workers") == "auto":
            spec = _automatic(task, settings, followers.notice)
        else:
            spec = RunSpec.of(task=task, **arrange(settings))
        folder = Path(out) if out else None
        return run(spec, out=folder, resume=resume, allow_changes=allow_changes, callbacks=followers)


def _automatic(task: str, settings: dict[str, Any], notice: Callable[[str], None]) -> RunSpec:
    """The spec on the split of this machine's cores that is measured to be the fastest."""
    arranged = arrange({**settings, "workers": None})
    if arranged["launcher"] == "env":
        raise UsageError("workers auto chooses how many to start, but they have been started already")
    if arranged["strategy"] in STRATEGIES and arranged["strategy"] not in ("single", "allreduce"):
        raise UsageError(f"workers auto chooses between single and allreduce, not {arranged['strategy']}")
    check(RunSpec.of(task=task, **arranged))
    check_system("local")
    spec = RunSpec.of(
        task=task, **{**arranged, "strategy": "single", "transport": "solo", "launcher": "inline"}
    )
    _launcher(spec.replace(launcher="local"))
    from manyhands.runs import autotune
    from manyhands.runs.resolve import resolve
    from manyhands.tasks import find

    spec = resolve(spec)
    return autotune.choose(spec, find.build(spec.task, spec.options).unit, notice)


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
    callbacks: Sequence[Callback] | BackgroundCallbacks = (),
) -> RunRecord:
    """Carry out a spec in a folder of its own (or continue it there) and return the record.

    Observers are called in threads of their own; none of them can end the run (law 12).
    """
    if out is not None:
        usable(out)
    check(spec)
    launcher = _launcher(spec)
    from manyhands.runs.resolve import resolve

    spec = resolve(spec)
    if not launcher.leads:
        return _follow(spec, launcher)
    folder = RunFolder(_choose(spec, out, resume))
    with BackgroundCallbacks.of(callbacks) as followers:
        if resume and out is None and not folder.exists():
            followers.notice(f"{RUNS} has no run of just these settings to resume: starting {folder.path}")
        return _carry_out(spec, launcher, folder, resume and folder.exists(), allow_changes, followers)


def resume_folder(
    path: Path,
    settings: dict[str, Any],
    *,
    allow_changes: bool = False,
    trust: bool = False,
    callbacks: Sequence[Callback] | BackgroundCallbacks = (),
) -> RunRecord:
    """Continue the run in a folder; settings that are given and differ are changes."""
    folder = RunFolder(usable(path))
    stored, signed = folder.known_spec()
    if settings.get("workers") == "auto":
        raise UsageError(
            f"workers auto is for new runs; say how many go on with {path} (it had {stored.workers})"
        )
    task_options = {**stored.options, **settings.get("options", {})}
    recipe_options = {**stored.recipe_options, **settings.get("recipe_options", {})}
    settings = {**rearrange(stored, settings), "options": task_options, "recipe_options": recipe_options}
    spec = stored.replace(**settings)
    check(spec)
    with BackgroundCallbacks.of(callbacks) as followers:
        if leads():
            vouch(folder, stored, signed or trust, followers.notice)
        launcher = _launcher(spec)
        if (
            not launcher.leads and spec.task_file is not None
        ):  # whether it is imported is for rank 0 to decide
            return _follow(spec, launcher)
        from manyhands.runs.resolve import resolve

        spec = resolve(spec)
        if not launcher.leads:
            return _follow(spec, launcher)
        record = _carry_out(spec, launcher, folder, True, allow_changes, followers)
    if trust and not signed:
        folder.sign()
    return record


def check(spec: RunSpec) -> None:
    """Answer what can be known to be wrong before torch is even imported (law 10)."""
    check_names(spec)
    faults.from_environment()
    faults.slowness(0)
    check_combination(spec)
    if spec.offload != "none" and spec.offload_to is not None:
        offload_folder.choose(spec.offload_to)


def check_names(spec: RunSpec) -> None:
    """Names that nobody has: of a task, of a member of an axis, of a strategy's option."""
    if ".py" not in spec.task and spec.task not in TASKS:
        raise unknown("task", spec.task, TASKS)
    usable(Path(spec.task))
    for what, axis, name in (
        ("recipe", RECIPES, spec.recipe),
        ("strategy", STRATEGIES, spec.strategy),
        ("transport", TRANSPORTS, spec.transport),
        ("launcher", LAUNCHERS, spec.launcher),
    ):
        if name is not None and name not in axis:
            raise unknown(what, name, axis)
    options.parse(spec.strategy, spec.strategy_options)


def check_combination(spec: RunSpec) -> None:
    """Names that are known and do not go together, each with its reason."""
    options.build(spec.strategy, spec.strategy_options)
    check_arrangement(spec)


def _launcher(spec: RunSpec) -> Launcher:
    """The spec's launcher; one that starts processes begins to, while this one looks at the data."""
    if spec.offload != "none":  # before they load torch
        allocator.huge_pages()
    launcher: Launcher = registry.member("launcher", LAUNCHERS, spec.launcher)()
    launcher.warm_up()
    return launcher


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
    first, taken = RUNS / spec.name, _numbered(RUNS / spec.name)
    if resume and (there := taken or _numbered(RUNS / spec.old_name)):
        return there[-1]
    return first.with_name(f"{first.name}-{len(taken) + 1}") if taken else first


def _numbered(first: Path) -> list[Path]:
    """The folders of this name that are there: itself, `...-2`, `...-3`, and so on."""
    more = (first.with_name(f"{first.name}-{k}") for k in itertools.count(2))
    return list(itertools.takewhile(lambda path: path.exists(), itertools.chain([first], more)))


def _visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def _carry_out(
    spec: RunSpec,
    launcher: Launcher,
    folder: RunFolder,
    resume: bool,
    allow_changes: bool,
    followers: BackgroundCallbacks,
) -> RunRecord:
    from manyhands.engine.job import Job

    notice = followers.notice
    with ExitStack() as stack:
        new = not folder.path.exists()
        stack.enter_context(folder.claimed())
        stack.enter_context(followers)  # closed while the folder is held: a tracker may write there
        accept = frozenset[str]()
        try:
            spec = _in_micro_batches(spec, folder.spec() if resume else None, notice)
        except BaseException:  # such as Ctrl-C: a folder without a run would be in the way of the next one
            if new:
                folder.vanish()
            raise
        if resume:
            folder.check_own()
            before = folder.spec()
            if (changes := before.differences(spec)) and not allow_changes:
                raise UsageError(
                    f"{folder.path} was started with other settings ({'; '.join(changes)}); "
                    "go on all the same with --allow-changes"
                )
            record = result_of(folder, before, notice)
            if record is not None and record.status in ("finished", "target") and not changes:
                notice(f"{folder.path} is already finished")
                followers.ended(record)
                return record
            if moves := before.moves(spec):
                notice(f"going on with {', '.join(moves)}: the same samples in the same order")
            folder.choices()  # what is wrong with them is said before any worker is started
            if changes or moves:
                accept = frozenset({before.id})
        else:
            folder.create()
            folder.write_spec(spec)
        say_if_unsigned(spec, notice)
        for left in leftovers.sweep():
            notice(f"removed {left}, left behind by a run that was killed")
        threads = spec.threads or max(1, environment.cores() // spec.ranks)
        job = Job(spec, folder.path, resume, accept, one_worker=baseline.one_worker(RUNS, spec, threads))
        return _with_restarts(spec, launcher, folder, job, followers)


def _in_micro_batches(spec: RunSpec, before: RunSpec | None, notice: Callable[[str], None]) -> RunSpec:
    """A pipeline with so many micro-batches as it had before, or else as a short measurement finds best."""
    if spec.strategy != "pipeline" or spec.stages == 1 or spec.strategy_options.get("micro_batches"):
        return spec
    had = before.strategy_options.get("micro_batches") if before and before.strategy == "pipeline" else None
    if had:
        return spec.replace(strategy_options={**spec.strategy_options, "micro_batches": had})
    from manyhands.runs import autotune
    from manyhands.tasks import find

    return autotune.with_micro_batches(spec, find.build(spec.task, spec.options).unit, notice)


def _with_restarts(
    spec: RunSpec,
    launcher: Launcher,
    folder: RunFolder,
    job: Job,
    followers: BackgroundCallbacks,
) -> RunRecord:
    """Launch the gang, and again from the last checkpoint as often as the user allows."""
    from manyhands.engine.checkpoint.resume import how_to_go_on
    from manyhands.engine.session import work

    supervision = SupervisionOptions(
        followers.hear, followers.notice, folder.path / "logs", spec.timeout, *_losses(spec)
    )
    for attempt in itertools.count():
        try:
            records: list[RunRecord] = launcher.launch(
                work,
                spec.ranks,
                replace(job, resume=job.resume or attempt > 0, attempt=attempt),
                supervision=supervision,
            )
            return records[0]
        except WorkerFailedError as error:
            if attempt == spec.restarts:
                raise WorkerFailedError(f"{error}\n{how_to_go_on(folder)}", error.rank) from error
            again = f"starting again from the last checkpoint (restart {attempt + 1} of {spec.restarts})"
            followers.notice(f"{error}\n{again}")
        except ManyhandsError:
            raise
        except Exception as error:
            if spec.launcher == "inline":  # others have a log of their own
                tracebacks.keep(error, folder.path / "logs" / "rank-0.log", f"worker 0 of 1 of {folder.path}")
                error.add_note(how_to_go_on(folder))
            raise
    raise AssertionError


def _losses(spec: RunSpec) -> tuple[frozenset[int], int, int]:
    """Who may be lost while the others go on, how many of these must remain, how many are replaced.

    Rank 0 keeps the books and servers hold what is learned: without them there is no going on. Messages to
    one that is gone do not come back, so only ranks that meet in memory can do without each other.
    """
    if spec.strict or not STRATEGIES[spec.strategy].free or spec.transport != "shm":
        return frozenset(), 1, 0
    essential = max(1, spec.servers)
    spare = frozenset(range(essential, spec.ranks))
    return spare, 1 if spec.servers else 0, spec.restarts


def _follow(spec: RunSpec, launcher: Launcher) -> RunRecord:
    """Be a rank that torchrun or mpirun started beside the one that leads: do what that one says."""
    records: list[RunRecord] = launcher.launch(print, spec.ranks)
    return records[0]
