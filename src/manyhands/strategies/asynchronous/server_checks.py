"""Models and recipes that parameter servers cannot train, refused before any worker is started."""

from __future__ import annotations

import torch

from manyhands.core.errors import UsageError
from manyhands.recipes.own_recipe import AnyRecipe
from manyhands.records.spec import RunSpec
from manyhands.strategies import sparse_gradients
from manyhands.tasks.base import Task


def check(spec: RunSpec, task: Task, recipe: AnyRecipe) -> None:
    """Refuse optimizers that need more than slices on several servers, and models with sparse gradients."""
    if recipe.optimizer in ("lars", "lamb") and spec.servers > 1:
        raise UsageError(
            f"{recipe.optimizer} needs the norms of whole layers, and {spec.servers} servers hold slices of "
            "them: use one server"
        )
    with torch.random.fork_rng(devices=[]):
        sparse_gradients.refuse(task.build(), spec.strategy)
