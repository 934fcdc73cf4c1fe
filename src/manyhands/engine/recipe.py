"""The recipe of a resolved spec: the user's options over the task's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.core import registry
from manyhands.recipes import RECIPES
from manyhands.recipes.base import Recipe
from manyhands.records.spec import RunSpec
from manyhands.strategies import STRATEGIES
from manyhands.tasks.base import Task

# Defaults of a task that hold for any optimizer; its learning rate was found with SGD.
_COURSE = ("warmup", "decay", "milestones", "factor")


def make_recipe(spec: RunSpec, task: Task) -> Recipe:
    """The recipe of a resolved spec: the user's options over the task's defaults."""
    assert spec.recipe is not None
    builder, given = builder_of(spec.recipe), spec.recipe_options
    known = registry.options(builder)
    sgd = "optimizer" in known and given.get("optimizer", known["optimizer"].default) == "sgd"
    own = {
        name: value
        for name, value in task.defaults.recipe_options.items()
        if name in known and (sgd or name in _COURSE)
    }
    if not STRATEGIES[spec.strategy].momentum and "momentum" in known and "momentum" not in given:
        own = _without_momentum(known, own, given)
    recipe: Recipe = builder(**{**own, **given})
    return recipe


def _without_momentum(
    known: dict[str, registry.Option], own: dict[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The task's defaults without momentum: with it, a learning rate acts like lr / (1 - momentum)."""
    momentum = own.get("momentum", known["momentum"].default)
    plain = {**own, "momentum": 0.0}
    if "nesterov" in known:
        plain["nesterov"] = False
    if "lr" in own and "lr" not in given:
        plain["lr"] = round(own["lr"] / (1.0 - momentum), 12)
    return plain


def builder_of(recipe: str) -> registry.Builder:
    builder: registry.Builder = registry.member("recipe", RECIPES, recipe)
    return builder
