"""Models that cannot be divided into the stages that were asked for, refused before any worker is started."""

from __future__ import annotations

import torch

from manyhands.core import formatting
from manyhands.core.errors import UsageError
from manyhands.core.registry.strategies import STRATEGIES
from manyhands.offload.blocks import blocks_of, joined
from manyhands.recipes.own_recipe import AnyRecipe
from manyhands.records.spec import RunSpec
from manyhands.tasks.base import Task
from manyhands.tasks.keras_model import KerasModule


def check(spec: RunSpec, task: Task, recipe: AnyRecipe) -> None:
    """Refuse a model with too few blocks, or a cut between blocks that share a parameter."""
    if spec.stages == 1:
        return
    with torch.random.fork_rng(devices=[]):
        model = task.build()
    if isinstance(model, KerasModule):
        raise UsageError(
            f"{task.name} is a Keras model, which cannot be divided into {spec.stages} stages: use "
            f"{', '.join(name for name, row in STRATEGIES.items() if not row.staged)}"
        )
    blocks = blocks_of(model)
    if spec.stages > len(blocks):
        count = formatting.plural(len(blocks), "block")
        raise UsageError(f"{task.name} has {count} and cannot be cut into {spec.stages} stages")
    tied = joined(blocks)
    for border in spec.strategy_options.get("cut", ()):
        if border >= len(blocks) or border in tied:
            why = (
                "blocks on both sides share a parameter" if border in tied else f"it has {len(blocks)} blocks"
            )
            raise UsageError(f"{task.name} cannot be cut at block {border}: {why}")
    cuts = len(blocks) - 1 - len(tied)
    if spec.stages > cuts + 1:
        raise UsageError(
            f"{task.name} shares parameters between its blocks, which must stay together: it can be cut into "
            f"at most {cuts + 1} stages, not {spec.stages}"
        )
