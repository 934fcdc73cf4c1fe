"""Fill in what a spec leaves to its task, and check the result against data and model (law 10)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from manyhands.core import environment, formatting, registry
from manyhands.core.errors import UsageError, cut
from manyhands.core.registry import strategies
from manyhands.data.order import sizes
from manyhands.devices.device import HOST, choose
from manyhands.engine import initial_weights
from manyhands.engine.recipe import make_recipe, parse_options
from manyhands.recipes.own_recipe import AnyRecipe, OwnRecipe
from manyhands.records.spec import RunSpec
from manyhands.strategies import options as strategy_options
from manyhands.tasks import TASKS, contract, find
from manyhands.tasks.base import Task
from manyhands.tasks.examine import Examination


def resolve(spec: RunSpec) -> RunSpec:
    """Return the spec with nothing left open, or raise a UsageError that says why it cannot be run."""
    # options get their own types: `--set width=2` and {"width": 2} are the same spec
    options = registry.parse(spec.task, find.builder(spec.task), spec.options)
    task = _built(spec.task, options)
    _check_size(spec.replace(options=options), task)
    contract.check_sizes(task)
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
    if spec.sync_batchnorm and not spec.drop_last and 0 < n % batch < spec.workers * spec.accumulate:
        raise UsageError(
            f"--sync-batchnorm needs a sample for every worker and micro-batch in every batch, but the last "
            f"of an epoch has {n % batch} of {n:,}: choose another batch, or --drop-last"
        )
    found = examined(spec.replace(options=options))
    if found.needs_two:
        _check_batch_norm(spec, n, batch)
    if found.writes and spec.workers > 1:
        raise UsageError(
            f"the model of {task.name} changes its parameter {found.writes[0]} in forward (as "
            "Embedding(max_norm=...) does), which each worker would do by itself: use one worker"
        )
    if found.keras_norms and spec.sync_batchnorm:
        raise UsageError("--sync-batchnorm cannot reach the batch norms of a Keras model: leave it out")
    if spec.init is not None:
        _check_weights(task, spec.init)
    recipe = spec.recipe or task.defaults.recipe
    resolved = spec.replace(
        options=options,
        strategy_options=strategy_options.parse(spec.strategy, spec.strategy_options),
        batch=batch,
        device=device,
        epochs=spec.epochs or task.defaults.epochs,
        recipe=recipe,
        recipe_options=parse_options(spec, recipe),
        target=task.target if spec.target is None else spec.target,
    )
    made = make_recipe(resolved, task)
    if made.own_schedule is not None:
        made.own_schedule.check(n)
    made = _bound(made, task, batch)
    _check_scope(resolved, made)
    if resolved.traits.check:
        registry.load(resolved.traits.check)(resolved, task, made)
    return resolved


def _bound(recipe: AnyRecipe, task: Task, batch: int) -> AnyRecipe:
    """The recipe for the task's model: a function of the user's is called, and its optimizer tried."""
    if not isinstance(recipe, OwnRecipe):
        return recipe
    with torch.random.fork_rng(devices=[]):
        model = task.build()
    return recipe.bound({name: p for name, p in model.named_parameters() if p.requires_grad}, batch)


_SCOPES = {"elements": "slices of parameters", "parameters": "some of the parameters", "model": "all of them"}


def _check_scope(spec: RunSpec, recipe: AnyRecipe) -> None:
    """Refuse an optimizer that needs to see more at a time than the strategy lets one worker see."""
    order = list(_SCOPES)
    if order.index(recipe.scope) <= order.index(spec.update_scope):
        return
    needs = {"parameters": "whole parameters", "model": "all parameters together"}[recipe.scope]
    who = (
        f"{spec.servers} servers" if spec.servers else f"strategy {spec.strategy} with {spec.workers} workers"
    )
    gives = f"{who} gives each {_SCOPES[spec.update_scope]}"
    if spec.servers:
        gives = f"each of {who} has {_SCOPES[spec.update_scope]}"
    can = [
        name
        for name, row in strategies.STRATEGIES.items()
        if not row.serves and not row.one_worker and order.index(row.scope) >= order.index(recipe.scope)
    ]
    raise UsageError(
        f"{recipe.optimizer} needs {needs} for an update, and {gives}: use "
        f"{'one server, or ' if spec.servers else ''}{', '.join(can[:-1])} or {can[-1]}"
    )


def examined(spec: RunSpec) -> Examination:
    """What a look at the first samples of the spec's task has shown; a UsageError if it cannot be trained."""
    return find.examined(spec.task, spec.options, choose(spec.device).where, getattr(torch, spec.dtype))


def _check_batch_norm(spec: RunSpec, n: int, batch: int) -> None:
    """Refuse a part of a batch with one sample, if the model cannot train on it."""
    last = 0 if spec.drop_last else n % batch
    for size in filter(None, (batch, last)):
        parts = (
            [size]
            if spec.sync_batchnorm
            else [
                part
                for share in sizes(size, spec.replicas)
                for part in sizes(share, max(spec.accumulate, spec.micro_batches))
            ]
        )
        if 1 not in parts:
            continue
        whose = "every batch" if size == batch else f"the last batch of an epoch ({size} of {n:,} samples)"
        part = f"a part with one sample, of {len(parts)}" if len(parts) > 1 else "one sample"
        instead = "use a larger --batch" if size == batch else "use --drop-last, or another --batch"
        raise UsageError(
            f"{whose} has {part}, and the batch norm of {spec.task} needs at least two: {instead}"
        )


def _check_weights(task: Task, path: str) -> None:
    """Refuse a file of weights that does not fit the model."""
    with torch.random.fork_rng(devices=[]):
        initial_weights.load(task.build(), path)


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
            count = sum(parameter.numel() for parameter in task.build().parameters())
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
