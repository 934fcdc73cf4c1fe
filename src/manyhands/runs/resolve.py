"""Fill in what a spec leaves to its task, and check the result against data and model (law 10)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from manyhands.core import environment, formatting, registry
from manyhands.core.errors import UsageError, cut
from manyhands.devices.device import HOST, choose
from manyhands.engine.recipe import builder_of, make_recipe
from manyhands.records.spec import RunSpec
from manyhands.strategies import options as strategy_options
from manyhands.tasks import TASKS, contract, find
from manyhands.tasks.base import Task


def resolve(spec: RunSpec) -> RunSpec:
    """Return the spec with nothing left open, or raise a UsageError that says why it cannot be run."""
    # options get their own types: `--set width=2` and {"width": 2} are the same spec
    options = registry.parse(spec.task, find.builder(spec.task), spec.options)
    task = _built(spec.task, options)
    _check_size(spec.replace(options=options), task)
    contract.check_sizes(task)
    if ".py" in spec.task:  # a test checks the targets of our own tasks
        contract.check_targets(task)
    n = len(task.train)
    batch = spec.batch or min(task.defaults.batch, n)
    if batch > n:
        raise UsageError(f"batch {batch:,} is larger than the {n:,} training samples of {task.name}")
    if spec.traits.staged and spec.replicas * spec.micro_batches > batch:
        raise UsageError(
            f"batch {batch} cannot be divided over {spec.replicas} x {spec.micro_batches} (pipelines x "
            "micro-batches): some would have no sample"
        )
    if spec.replicas > batch:
        raise UsageError(f"{spec.workers} workers cannot share a batch of {batch}: some would have no sample")
    if spec.replicas * spec.accumulate > batch:
        raise UsageError(
            f"batch {batch} cannot be divided over {spec.workers} x {spec.accumulate} "
            "(workers x accumulate): some would have no sample"
        )
    choose(spec.device)
    device = "cpu" if spec.traits.host_memory and choose("auto") is not HOST else spec.device
    if spec.sync_batchnorm and 0 < n % batch < spec.workers * spec.accumulate:
        raise UsageError(
            f"--sync-batchnorm needs a sample for every worker and micro-batch in every batch, but the last "
            f"of an epoch has {n % batch} of {n:,}: choose another batch"
        )
    recipe = spec.recipe or task.defaults.recipe
    resolved = spec.replace(
        options=options,
        strategy_options=strategy_options.parse(spec.strategy, spec.strategy_options),
        batch=batch,
        device=device,
        epochs=spec.epochs or task.defaults.epochs,
        recipe=recipe,
        recipe_options=registry.parse(f"recipe {recipe}", builder_of(recipe), spec.recipe_options),
        target=task.target if spec.target is None else spec.target,
    )
    made = make_recipe(resolved, task)
    if resolved.traits.check:
        registry.load(resolved.traits.check)(resolved, task, made)
    return resolved


def _built(name: str, options: Mapping[str, Any]) -> Task:
    """Build the task, or say that there is not enough memory for its data."""
    try:
        return find.build(name, options)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        asked = re.search(r"[Uu]nable to allocate .*|tried to allocate \d+ bytes", str(error))
        why = f" ({asked[0][:1].lower()}{asked[0][1:]})" if asked else ""
        raise UsageError(f"{name} cannot be built: there is not enough memory for its data{why}") from error


def _check_size(spec: RunSpec, task: Task) -> None:
    """Refuse options that make one of our own models too large for this machine, before it is built.

    A user's model is not built only to be measured: that may take long, or download something.
    """
    if spec.task not in TASKS or not spec.options:
        return
    given = ", ".join(f"{name}={value}" for name, value in spec.options.items())
    try:
        with torch.device("meta"):  # sizes without memory
            count = sum(parameter.numel() for parameter in task.model().parameters())
    except (RuntimeError, OverflowError, TypeError) as error:
        raise UsageError(
            f"{task.name} cannot be built with {cut(given)}: its tensors would be too large"
        ) from error
    needed = 2 * count * (8 if spec.dtype == "float64" else 4)  # as much again for the gradients
    if needed > environment.memory():
        raise UsageError(
            f"{task.name} with {given} has {count:,} parameters: training them takes at least "
            f"{formatting.size(needed)}, and this machine has {formatting.size(environment.memory())}"
        )
