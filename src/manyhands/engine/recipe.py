"""The recipe of a resolved spec: the user's options over the task's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.core import registry
from manyhands.recipes import RECIPES
from manyhands.recipes.base import WITH_MOMENTUM, Recipe
from manyhands.records.spec import RunSpec
from manyhands.strategies import STRATEGIES
from manyhands.tasks.base import Task

# Defaults of a task that hold for any optimizer; its learning rate was found with SGD.
_COURSE = ("warmup", "decay", "milestones", "factor")


def make_recipe(spec: RunSpec, task: Task) -> Recipe:
    """The recipe of a resolved spec: the user's options over the defaults of the task and the strategy."""
    known, own = _defaults(spec, task)
    given = spec.recipe_options
    if not STRATEGIES[spec.strategy].momentum and "momentum" in known and "momentum" not in given:
        own = _without_momentum(known, own, given)
    return _built(spec, own)


def changes(spec: RunSpec, task: Task) -> str:
    """What the strategy changed in the recipe: `momentum 0 instead of 0.9, lr 4 instead of 0.4`."""
    made, usual = make_recipe(spec, task), _built(spec, _defaults(spec, task)[1])
    if made.optimizer not in WITH_MOMENTUM:
        return ""
    pairs = {name: (getattr(made, name), getattr(usual, name)) for name in ("momentum", "lr")}
    return ", ".join(f"{name} {new:g} instead of {old:g}" for name, (new, old) in pairs.items() if new != old)


def _defaults(spec: RunSpec, task: Task) -> tuple[dict[str, registry.Option], dict[str, Any]]:
    """The options that the recipe knows, and the task's defaults for them."""
    assert spec.recipe is not None
    known, given = registry.options(builder_of(spec.recipe)), spec.recipe_options
    sgd = "optimizer" in known and given.get("optimizer", known["optimizer"].default) == "sgd"
    own = {
        name: value
        for name, value in task.defaults.recipe_options.items()
        if name in known and (sgd or name in _COURSE)
    }
    return known, own


def _built(spec: RunSpec, own: Mapping[str, Any]) -> Recipe:
    assert spec.recipe is not None
    recipe: Recipe = builder_of(spec.recipe)(**{**own, **spec.recipe_options})
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
