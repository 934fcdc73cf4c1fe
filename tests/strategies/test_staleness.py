"""What a stale gradient does to each optimizer: it counts less, and what came before it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.recipes import optimizers
from manyhands.recipes.base import Recipe
from manyhands.recipes.members import constant, lamb, lars
from manyhands.strategies.asynchronous.staleness import velocity_kept

LR, STALENESS = 0.1, 3
FIRST, SECOND = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([-4.0, 0.5, 2.0])


def built(recipe: Recipe) -> tuple[Tensor, Optimizer]:
    """With a first step made on a fresh gradient."""
    weight = torch.tensor([0.5, -0.25, 2.0], dtype=torch.float64)
    optimizer = optimizers.build(recipe, [("weight", weight)], ())
    step(weight, optimizer, FIRST, LR)
    return weight, optimizer


def step(weight: Tensor, optimizer: Optimizer, gradient: Tensor, lr: float, divisor: int = 1) -> Tensor:
    """How far the weight went."""
    before, weight.grad = weight.clone(), gradient.to(weight.dtype)
    optimizers.set_lr(optimizer, lr / divisor)
    with velocity_kept(optimizer, divisor):
        optimizer.step()
    return weight - before


def moved(recipe: Recipe, gradient: Tensor, lr: float = LR, divisor: int = 1) -> Tensor:
    return step(*built(recipe), gradient, lr, divisor)


@pytest.mark.parametrize(
    "recipe", [constant(momentum=0.9), lars(coefficient=0.1, weight_decay=0.0)], ids=lambda r: r.optimizer
)
def test_of_a_velocity_only_what_comes_in_is_divided(recipe: Recipe) -> None:
    """A step is -lr (m v + what comes in), so the two parts follow from steps with and without the first."""
    whole = moved(recipe, SECOND)
    past = moved(recipe, torch.zeros(3))
    expected = past + (whole - past) / STALENESS
    torch.testing.assert_close(moved(recipe, SECOND, divisor=STALENESS), expected, rtol=0, atol=1e-15)


def test_plain_sgd_is_a_smaller_rate_bit_for_bit() -> None:
    recipe = constant(weight_decay=0.1)
    assert torch.equal(moved(recipe, SECOND, divisor=STALENESS), moved(recipe, SECOND, LR / STALENESS))


@pytest.mark.parametrize(
    "recipe", [constant(optimizer="adam"), constant(optimizer="adamw"), lamb()], ids=lambda r: r.optimizer
)
def test_where_the_size_of_a_gradient_does_not_matter_the_step_is_shorter(recipe: Recipe) -> None:
    expected = moved(recipe, SECOND) / STALENESS
    torch.testing.assert_close(moved(recipe, SECOND, divisor=STALENESS), expected, rtol=1e-9, atol=0)


def test_a_velocity_that_the_step_makes_is_divided_too_and_another_is_left_alone() -> None:
    """LARS makes a velocity at a parameter's first gradient; a parameter without one is not touched."""
    weights = {name: torch.ones(3, dtype=torch.float64) for name in ("first", "second")}
    optimizer = optimizers.build(lars(), weights.items(), ())
    first, second = weights.values()
    step(first, optimizer, FIRST, LR)
    kept, first.grad = optimizer.state[first]["momentum_buffer"].clone(), None
    went = step(second, optimizer, SECOND, LR, STALENESS)
    assert torch.equal(optimizer.state[first]["momentum_buffer"], kept)
    torch.testing.assert_close(-LR * optimizer.state[second]["momentum_buffer"], went, rtol=1e-10, atol=0)
