"""The conformance suite of recipes: subclass `RecipeSuite` and set `name`."""

from __future__ import annotations

import json
import math
from dataclasses import fields

import pytest
import torch
from torch import Tensor, nn

from manyhands.core.registry import member
from manyhands.recipes import RECIPES
from manyhands.recipes.base import Recipe
from manyhands.recipes.optimizers import build, set_lr, undecayed

BATCH, EPOCH, HORIZON = 512, 25_600, 512_000  # 20 epochs of 50 steps


class RecipeSuite:
    """Contract tests of a recipe. `name` is its row in RECIPES."""

    name: str

    @pytest.fixture
    def recipe(self) -> Recipe:
        """The recipe with default options."""
        built = member("recipe", RECIPES, self.name)()
        assert isinstance(built, Recipe)
        return built

    def test_builds_with_defaults(self, recipe: Recipe) -> None:
        assert recipe.name == self.name

    def test_describes_itself_in_one_line(self, recipe: Recipe) -> None:
        line = recipe.describe(BATCH, EPOCH)
        assert line.startswith(f"{recipe.optimizer} · lr ")
        assert "\n" not in line

    def test_dict_is_json_and_complete(self, recipe: Recipe) -> None:
        values = recipe.to_dict()
        assert set(values) == {field.name for field in fields(Recipe)} - {"own_schedule"}
        assert json.loads(json.dumps(values)) == values

    def test_dict_builds_the_same_recipe(self, recipe: Recipe) -> None:
        assert Recipe(**json.loads(json.dumps(recipe.to_dict()))) == recipe

    def test_lr_is_finite_and_positive_over_the_run(self, recipe: Recipe) -> None:
        schedule = recipe.schedule(BATCH, EPOCH, HORIZON)
        lrs = [schedule(samples) for samples in range(0, HORIZON, BATCH)]
        assert all(math.isfinite(lr) and lr >= 0 for lr in lrs)
        assert all(lr > 0 for lr in lrs[1:])  # the first may be 0: a warm-up from zero
        assert schedule(HORIZON) == schedule(2 * HORIZON)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_descends_a_convex_bowl(self, recipe: Recipe, dtype: torch.dtype) -> None:
        before, after, _ = _descend(recipe, dtype)
        assert after < 0.5 * before

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_state_is_tensors_only(self, recipe: Recipe, dtype: torch.dtype) -> None:
        _, _, optimizer = _descend(recipe, dtype, steps=2)
        for state in optimizer.state.values():
            for key, value in state.items():
                assert isinstance(value, Tensor), key
                assert key == "step" or value.dtype == dtype


def _descend(
    recipe: Recipe, dtype: torch.dtype, steps: int = HORIZON // BATCH
) -> tuple[float, float, torch.optim.Optimizer]:
    """The mean squared error of a linear layer before and after a run with the recipe's own schedule."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 4, dtype=dtype, generator=generator)
    model, wanted = nn.Linear(4, 3).to(dtype), torch.randn(4, 3, dtype=dtype, generator=generator)
    with torch.no_grad():
        model.weight.copy_(torch.randn(3, 4, dtype=dtype, generator=generator))
        model.bias.fill_(1.0)
    optimizer = build(recipe, model.named_parameters(), undecayed(model))
    schedule = recipe.schedule(BATCH, EPOCH, HORIZON)
    losses = []
    for step in range(steps):
        set_lr(optimizer, schedule(step * BATCH))
        optimizer.zero_grad()
        loss = (model(inputs) - inputs @ wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1], optimizer
