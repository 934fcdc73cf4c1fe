"""What an optimizer keeps for each parameter: found by one step, on tensors of no importance.

Most optimizers create their state in their first step only. But a worker that has had no sample yet must have
room for the state that others send, and a checkpoint is checked before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyhands.recipes import optimizers
from manyhands.recipes.optimizer_trials import copy_with
from manyhands.recipes.own_recipe import AnyRecipe, OwnRecipe


class KeptTensor(NamedTuple):
    """A tensor that is kept for a parameter."""

    shape: torch.Size
    dtype: torch.dtype


class Kept(NamedTuple):
    """What is kept for one parameter, by kind."""

    tensors: dict[str, KeptTensor]  # usually in the shape of the parameter
    scalars: dict[str, Tensor | float]  # once, with the first value


def state_layout(recipe: AnyRecipe, model: nn.Module) -> dict[str, Kept]:
    """What the recipe's optimizer keeps for each parameter of a model that it trains, by name."""
    elements = recipe.scope == "elements"
    known: dict[tuple[object, ...], Kept] = {}
    found: dict[str, Kept] = {}
    whole = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    own = optimizers.for_model(recipe, model) if isinstance(recipe, OwnRecipe) else None
    groups = optimizers.groups_of(own) if own is not None else {}
    embeddings, undecayed = optimizers.embeddings(model), optimizers.undecayed(model)
    for name, parameter in whole.items():
        if name in recipe.left_out:
            continue
        # where elements count, parameters with as many dimensions are alike
        shape = (2,) * parameter.ndim if elements else tuple(parameter.shape)
        key = (groups.get(name), name in embeddings, name in undecayed, parameter.dtype, shape)
        if key not in known:
            small = torch.zeros(shape, dtype=parameter.dtype)
            optimizer = (
                optimizers.for_model(recipe, model, {name: small})
                if own is None
                else copy_with(own, {parameter: small})
            )
            known[key] = _after_a_step(optimizer, small, recipe.scalars)
        found[name] = _with_shape(known[key], torch.Size(shape), parameter.shape)
    return found


def _after_a_step(optimizer: torch.optim.Optimizer, small: Tensor, scalars: Mapping[str, str]) -> Kept:
    small.grad = torch.zeros_like(small)
    optimizer.step()
    kept = Kept({}, {})
    for kind, value in sorted(optimizer.state[small].items()):
        if kind in scalars and value is not None:
            kept.scalars[kind] = value
        elif isinstance(value, Tensor):
            kept.tensors[kind] = KeptTensor(value.shape, value.dtype)
    return kept


def _with_shape(kept: Kept, tried: torch.Size, real: torch.Size) -> Kept:
    tensors = {
        kind: each._replace(shape=real) if each.shape == tried else each
        for kind, each in kept.tensors.items()
    }
    return kept._replace(tensors=tensors)
