"""Refuse names and combinations that cannot work, in one sentence, before anything starts (law 10)."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec

from manyhands.core import environment, formatting
from manyhands.core.atomic_files import usable
from manyhands.core.errors import UsageError, shown, unknown
from manyhands.core.registry import launchers, strategies, transports
from manyhands.core.registry.launchers import LAUNCHERS
from manyhands.core.registry.strategies import STRATEGIES
from manyhands.core.registry.transports import TRANSPORTS
from manyhands.engine.fault_injection import faults
from manyhands.offload import scratch_file
from manyhands.recipes import RECIPES
from manyhands.records.spec import RunSpec
from manyhands.records.user_names import is_brought, is_users
from manyhands.runs import defaults
from manyhands.strategies import options
from manyhands.tasks import TASKS


def check(spec: RunSpec) -> None:
    """Refuse everything that can be checked without importing torch."""
    check_names(spec)
    faults.from_environment()
    faults.slowness(0)
    check_combination(spec)
    if spec.offload != "none" and spec.offload_to is not None:
        scratch_file.choose(spec.offload_to)


def check_names(spec: RunSpec) -> None:
    """Refuse unknown names: of a task, of a member of an axis, of a strategy's option."""
    if ".py" not in spec.task and spec.task not in TASKS and not is_brought(spec.task):
        raise unknown("task", spec.task, TASKS)
    for path in spec.user_files:
        usable(path)
    if spec.lr_schedule is not None and not is_users(spec.lr_schedule):
        raise UsageError(
            f"lr_schedule must be FILE.py:NAME, a function from samples to a learning rate, got "
            f"{shown(spec.lr_schedule)}; schedules of manyhands are options of its recipes (--set "
            "recipe.decay=cosine)"
        )
    recipe = None if spec.recipe is not None and is_users(spec.recipe) else spec.recipe
    for what, axis, name in (
        ("recipe", RECIPES, recipe),
        ("strategy", STRATEGIES, spec.strategy),
        ("transport", TRANSPORTS, spec.transport),
        ("launcher", LAUNCHERS, spec.launcher),
    ):
        if name is not None and name not in axis:
            raise unknown(what, name, axis)
    options.parse(spec.strategy, spec.strategy_options)


def check_combination(spec: RunSpec) -> None:
    """Refuse known members that do not work together, each with its reason."""
    chosen = options.build(spec.strategy, spec.strategy_options)
    check_system(spec.launcher)
    _check_size(spec)
    if spec.traits.one_worker and spec.workers != 1:
        raise UsageError(f"strategy {spec.strategy} has one worker, but workers is {spec.workers}")
    _check_ranks(spec)
    _check_packages(spec)
    _check_strategy(spec, chosen)
    _check_noise_scale(spec)
    _check_precision(spec)
    _check_evaluations(spec)
    _check_gpu(spec)
    if spec.restarts and not LAUNCHERS[spec.launcher].restarts:
        raise UsageError(
            f"--restarts starts workers again, which launcher {spec.launcher} cannot do: use "
            f"{' or '.join(launchers.for_restarts())} (torchrun has --max-restarts)"
        )


def check_system(launcher: str) -> None:
    """Refuse a launcher that needs functions that Python lacks on this system; one worker needs none."""
    if missing := [name for name in LAUNCHERS[launcher].system if not hasattr(os, name)]:
        raise UsageError(
            f"launcher {launcher} needs Linux: Python on this system ({sys.platform}) has no "
            f"os.{missing[0]}; one worker trains here, without --workers"
        )


def most_ranks() -> int:
    """Return the most ranks that may be started on this machine: many more than it has cores."""
    return min(1024, max(128, 16 * environment.cores()))


def most_threads() -> int:
    """Return the most threads that a worker may have; beyond the cores they cost more than they gain."""
    return max(64, 4 * environment.cores())


def _check_size(spec: RunSpec) -> None:
    """Refuse more threads or ranks than this machine can handle."""
    cores = formatting.plural(environment.cores(), "core")
    if spec.threads is not None and spec.threads > most_threads():
        raise UsageError(
            f"threads must be at most {most_threads():,} on this machine of {cores}, got {spec.threads:,}"
        )
    if LAUNCHERS[spec.launcher].one_machine and spec.ranks > most_ranks():
        serving = f" and servers is {spec.servers:,}" if spec.servers else ""
        raise UsageError(
            f"launcher {spec.launcher} starts at most {most_ranks():,} ranks on this machine of {cores}, but "
            f"workers is {spec.workers:,}{serving}: use fewer, or start them on several machines with "
            "torchrun"
        )


def _check_ranks(spec: RunSpec) -> None:
    """Refuse a transport or a launcher that does not support several ranks."""
    transport, known = TRANSPORTS[spec.transport], transports.for_processes()
    others = f"{', '.join(known[:-1])} or {known[-1]}"
    serving = f" and servers is {spec.servers}" if spec.servers else ""
    if transport.one_process:
        raise UsageError(
            f"transport {spec.transport} joins workers inside one process, for tests; between processes use "
            f"{others}"
        )
    if transport.one_rank and spec.ranks != 1:
        raise UsageError(
            f"transport {spec.transport} has one rank, but workers is {spec.workers}{serving}: use {others}"
        )
    if LAUNCHERS[spec.launcher].in_process and spec.ranks != 1:
        raise UsageError(
            f"launcher {spec.launcher} runs one rank, but workers is {spec.workers}{serving}: use "
            f"{launchers.LOCAL}"
        )


def _check_packages(spec: RunSpec) -> None:
    """Refuse packages that are not installed, and a transport that needs another launcher."""
    transport = TRANSPORTS[spec.transport]
    for row in (transport, LAUNCHERS[spec.launcher]):
        if row.package and find_spec(row.package) is None:
            raise UsageError(row.package_reason)
    if transport.launchers and spec.launcher not in transport.launchers:
        reason = transport.launcher_reason.format(ranks=spec.ranks)
        raise UsageError(f"transport {spec.transport} {reason}")


def _check_strategy(spec: RunSpec, chosen: options.StrategyOptions) -> None:
    """Refuse settings that the strategy does not support."""
    traits = spec.traits
    alone = TRANSPORTS[spec.transport].one_rank
    if traits.transports and spec.transport not in traits.transports and not alone:
        reason = traits.transport_reason.format(transport=spec.transport)
        raise UsageError(f"strategy {spec.strategy} {reason}")
    if spec.accumulate > 1 and not traits.accumulate:
        can = "micro_batches" in options.known(spec.strategy)
        instead = f": use --micro-batches {spec.accumulate}" if can else ""
        raise UsageError(f"strategy {spec.strategy} does not accumulate{instead}")
    chosen.check_workers(spec.workers)
    if spec.offload != "none" and not traits.offload and spec.workers > 1:
        raise UsageError(
            f"--offload cannot tell what {spec.strategy} gathers from activations: use allreduce or pipeline "
            f"with it, or {spec.strategy} without offload {spec.offload}"
        )
    if spec.memory is not None and spec.offload != "auto":
        raise UsageError(f"--memory is the limit per worker for offload auto, but offload is {spec.offload}")
    if spec.sync_batchnorm and not traits.sync_batchnorm and spec.workers > 1:
        raise UsageError(
            f"--sync-batchnorm needs workers that see the whole model and step together: use "
            f"{_with('sync_batchnorm')}, not {spec.strategy}"
        )


def _check_evaluations(spec: RunSpec) -> None:
    if spec.stop_at_target and not spec.evaluate_every:
        raise UsageError("--stop-at-target needs evaluations, but evaluate_every is 0 (never)")


def _check_noise_scale(spec: RunSpec) -> None:
    if not spec.noise_scale:
        return
    if not spec.traits.noise_scale:
        raise UsageError(
            "--noise-scale compares gradients of parts of a batch with the whole, which "
            f"{_with('noise_scale')} see, not {spec.strategy}"
        )
    if spec.workers * spec.accumulate == 1:
        raise UsageError(
            "--noise-scale compares gradients of parts of a batch with the whole, but here a batch is one "
            "part: use --accumulate 2, or more workers"
        )


def _check_precision(spec: RunSpec) -> None:
    if spec.precision != "full" and spec.dtype != "float32":
        raise UsageError(
            f"--precision {spec.precision} keeps parameters in float32, but dtype is {spec.dtype}: leave one "
            "of them out"
        )
    if spec.precision == "fp16" and spec.noise_scale:
        raise UsageError(
            "--noise-scale compares gradients of steps, and with --precision fp16 they are scaled and some "
            "steps are skipped: use bf16"
        )
    if spec.compile and spec.offload != "none":
        raise UsageError(
            f"--offload {spec.offload} moves what autograd saves of each layer, and --compile makes one of "
            "all layers: leave one of them out"
        )
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if spec.compile and not defaults.uses_cuda(spec.device) and not any(map(shutil.which, compilers)):
        raise UsageError(
            f"--compile needs a C++ compiler, and there is no {' or '.join(compilers)}: install one, or "
            "leave it out"
        )


def _check_gpu(spec: RunSpec) -> None:
    """Refuse shared memory for a model on a GPU; with parameters in main memory, only for --device cuda."""
    on_gpu = spec.device == "cuda" if spec.traits.host_memory else defaults.uses_cuda(spec.device)
    if TRANSPORTS[spec.transport].shared_memory and on_gpu:
        raise UsageError(
            f"transport {spec.transport} shares main memory, not a GPU's: use "
            f"{' or '.join(transports.for_gpus())}, or --device cpu"
        )


def _with(trait: str) -> str:
    """The names of the strategies that have a trait: `single and allreduce`."""
    return " and ".join(strategies.having(trait))
