"""Execute one run: lock its folder, launch its workers, and launch them again after a failure."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.callbacks.background import BackgroundCallbacks
from manyhands.core import allocator, environment, registry, tracebacks
from manyhands.core.errors import ManyhandsError, UsageError, WorkerFailedError
from manyhands.core.registry.launchers import LAUNCHERS
from manyhands.core.registry.transports import TRANSPORTS
from manyhands.launchers.base import Launcher, SupervisionOptions
from manyhands.records import baseline
from manyhands.records.record import RunRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.records.trust import own_result, warn_if_unsigned
from manyhands.runs.folders import RUNS
from manyhands.runs.launching import launch
from manyhands.strategies import options
from manyhands.transports.shm import leftovers

if TYPE_CHECKING:
    from manyhands.engine.job import Job

COMPILE_SECONDS = 600.0  # without progress that count as a hang, with --compile


def launcher_of(spec: RunSpec) -> Launcher:
    """Return the spec's launcher; if it starts processes, it begins while this process loads the data."""
    if spec.offload != "none":  # before processes load torch
        allocator.huge_pages()
    launcher: Launcher = registry.member("launcher", LAUNCHERS, spec.launcher)()
    launcher.warm_up()
    return launcher


def execute(
    spec: RunSpec,
    launcher: Launcher,
    folder: RunFolder,
    resume: bool,
    allow_changes: bool,
    callbacks: BackgroundCallbacks,
    gate: Path | None = None,
) -> RunRecord:
    """Run a (resolved) spec in this folder, or resume the run there, and return the record."""
    from manyhands.engine.job import Job

    notice = callbacks.on_notice
    with ExitStack() as stack:
        new = not folder.path.exists()
        stack.enter_context(folder.locked())
        stack.enter_context(callbacks)  # closed while the folder is locked: a tracker may write there
        accept = frozenset[str]()
        try:
            spec = _with_micro_batches(spec, folder.spec() if resume else None, notice)
        except BaseException:  # such as Ctrl-C: a folder without a run would be in the way of the next one
            if new:
                folder.remove_if_empty()
            raise
        if resume:
            folder.check_links()
            before = folder.spec()
            if (changes := before.differences(spec)) and not allow_changes:
                raise UsageError(
                    f"{folder.path} was started with other settings ({'; '.join(changes)}); "
                    "continue anyway with --allow-changes"
                )
            record = own_result(folder, before, notice)
            if record is not None and record.status in ("finished", "target") and not changes:
                notice(f"{folder.path} is already finished")
                callbacks.on_end(record)
                return record
            if moves := before.moves(spec):
                notice(f"continuing with {', '.join(moves)}: the same samples in the same order")
            folder.choices()  # errors in them are reported before any worker is started
            if changes or moves:
                accept = frozenset({before.id})
        else:
            folder.create()
            folder.write_spec(spec)
        warn_if_unsigned(spec, notice)
        for left in leftovers.sweep():
            notice(f"removed {left}, left behind by a run that was killed")
        threads = spec.threads or max(1, environment.cores() // spec.ranks)
        one_worker = baseline.one_worker(RUNS, spec, threads)
        job = Job(spec, folder.path, resume, accept, one_worker=one_worker, gate=gate)
        return _launch(spec, launcher, folder, job, callbacks)


def follow(spec: RunSpec, launcher: Launcher) -> RunRecord:
    """Run as one of the ranks that torchrun or mpirun started: do what rank 0 says."""
    records: list[RunRecord] = launcher.launch(print, spec.ranks)
    return records[0]


def _with_micro_batches(spec: RunSpec, before: RunSpec | None, notice: Callable[[str], None]) -> RunSpec:
    """Return a pipeline's spec with the micro-batches it had before, or with the fastest number measured."""
    name = "micro_batches"
    if name not in options.known(spec.strategy) or spec.stages == 1 or spec.strategy_options.get(name):
        return spec
    if before is not None and before.strategy == spec.strategy and (had := before.strategy_options.get(name)):
        return spec.replace(strategy_options={**spec.strategy_options, name: had})
    from manyhands.runs import autotune
    from manyhands.tasks import find

    return autotune.with_micro_batches(spec, find.build(spec.task, spec.options).unit, notice)


def _launch(
    spec: RunSpec, launcher: Launcher, folder: RunFolder, job: Job, callbacks: BackgroundCallbacks
) -> RunRecord:
    """Launch the workers, and again from the last checkpoint up to `spec.restarts` times."""
    from manyhands.engine.checkpoint.resume import how_to_continue
    from manyhands.engine.session import work

    supervision = _supervision(spec, folder, callbacks)
    for attempt in itertools.count():
        try:
            records: list[RunRecord] = launch(
                launcher,
                spec,
                work,
                replace(job, resume=job.resume or attempt > 0, attempt=attempt),
                supervision=supervision,
            )
            return records[0]
        except WorkerFailedError as error:
            if attempt == spec.restarts:
                raise WorkerFailedError(f"{error}\n{how_to_continue(folder)}", error.rank) from error
            again = f"starting again from the last checkpoint (restart {attempt + 1} of {spec.restarts})"
            callbacks.on_warning(f"{error}\n{again}")
        except ManyhandsError:
            raise
        except Exception as error:
            if LAUNCHERS[spec.launcher].in_process:  # other launchers keep a log per worker
                tracebacks.keep(error, folder.path / "logs" / "rank-0.log", f"worker 0 of 1 of {folder.path}")
                error.add_note(how_to_continue(folder))
            raise
    raise AssertionError


def _supervision(spec: RunSpec, folder: RunFolder, callbacks: BackgroundCallbacks) -> SupervisionOptions:
    """How the workers are supervised, and which of them may be lost while the others continue.

    Rank 0 hands out the work and servers hold the parameters: a run cannot continue without them. Messages to
    a lost rank are lost too, so only ranks that share memory can continue without each other.
    """
    # a batch of another size is compiled in the middle of a run, and takes much longer than a step
    timeout = COMPILE_SECONDS if spec.compile and spec.timeout is None else spec.timeout
    survives = spec.traits.asynchronous and TRANSPORTS[spec.transport].shared_memory and not spec.strict
    if not survives:
        return SupervisionOptions(
            *(callbacks.receive, callbacks.on_warning, folder.path / "logs", timeout),
            enough=lambda: callbacks.enough,
        )
    return SupervisionOptions(
        *(callbacks.receive, callbacks.on_warning, folder.path / "logs", timeout),
        enough=lambda: callbacks.enough,
        expendable=frozenset(range(max(1, spec.servers), spec.ranks)),
        min_remaining=1 if spec.servers else 0,
        max_replacements=spec.restarts,
    )
