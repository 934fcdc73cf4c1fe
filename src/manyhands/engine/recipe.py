"""The recipe of a resolved spec: the user's options over the task's defaults, or the user's own function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manyhands.core import registry
from manyhands.core.errors import UsageError
from manyhands.recipes import RECIPES
from manyhands.recipes.base import WITH_MOMENTUM, Recipe, check_clip
from manyhands.recipes.lr_schedule import OwnSchedule
from manyhands.recipes.own_recipe import AnyRecipe, OwnRecipe, check_function
from manyhands.records.spec import RunSpec
from manyhands.records.user_names import is_users
from manyhands.strategies import STRATEGIES
from manyhands.tasks import find
from manyhands.tasks.base import Task

# Defaults of a task that hold for any optimizer; its learning rate was found with SGD.
_COURSE = ("warmup", "decay", "milestones", "factor")
# Options that a schedule of the user's takes the place of.
_RATE = ("lr", "scaling", "warmup", "warmup_from", "decay", "milestones", "factor")


def make_recipe(spec: RunSpec, task: Task) -> AnyRecipe:
    """The recipe of a resolved spec: the user's options over the defaults of the task and the strategy."""
    assert spec.recipe is not None
    schedule = None
    if spec.lr_schedule is not None:
        schedule = OwnSchedule(spec.lr_schedule, find.function(spec.lr_schedule, "lr_schedule"))
    if is_users(spec.recipe):
        options = dict(spec.recipe_options)
        clip = options.pop("clip", _default_clip(builder_of(spec.recipe)))
        check_clip(clip)
        return OwnRecipe(
            name=spec.recipe,
            function=builder_of(spec.recipe),
            options=options,
            clip=clip,
            own_schedule=schedule,
        )
    known, own = _defaults(spec, task)
    given = spec.recipe_options
    if not STRATEGIES[spec.strategy].momentum and "momentum" in known and "momentum" not in given:
        own = _without_momentum(known, own, given)
    made = _built(spec, own)
    return made if schedule is None else replace(made, own_schedule=schedule)


def parse_options(spec: RunSpec, recipe: str) -> dict[str, Any]:
    """The options given for a recipe, checked and in its types."""
    given, builder = dict(spec.recipe_options), builder_of(recipe)
    if spec.lr_schedule is not None and (odd := [name for name in given if name in _RATE]):
        raise UsageError(
            f"the schedule {spec.lr_schedule} decides the learning rate, so {odd[0]} of the recipe would "
            "have no effect: leave one of them out"
        )
    clip = {"clip": given.pop("clip")} if is_users(recipe) and "clip" in given else {}
    owner = f"recipe {recipe}"
    return {**registry.parse(owner, builder, given), **registry.parse(owner, _clipped, clip)}


def changes(spec: RunSpec, task: Task) -> str:
    """What the strategy changed in the recipe: `momentum 0 instead of 0.9, lr 4 instead of 0.4`."""
    assert spec.recipe is not None
    made = make_recipe(spec, task)
    if not isinstance(made, Recipe) or made.optimizer not in WITH_MOMENTUM:
        return ""
    usual = _built(spec, _defaults(spec, task)[1])
    names = ("momentum", "lr") if made.own_schedule is None else ("momentum",)
    pairs = {name: (getattr(made, name), getattr(usual, name)) for name in names}
    return ", ".join(f"{name} {new:g} instead of {old:g}" for name, (new, old) in pairs.items() if new != old)


def builder_of(recipe: str) -> registry.Builder:
    """The function behind the name of a recipe."""
    if is_users(recipe):
        function = find.function(recipe, "recipe")
        check_function(recipe, function)
        return function
    builder: registry.Builder = registry.member("recipe", RECIPES, recipe)
    return builder


def _clipped(*, clip: float | None = None) -> None:
    """What every recipe of the user's takes besides its own options: the strategy clips."""


def _default_clip(function: registry.Builder) -> float | None:
    known = registry.options(function)
    return known["clip"].default if "clip" in known else None


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
