"""From a recipe and named tensors to a torch optimiser, with no weight decay where it does harm."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from manyhands.errors import UsageError
from manyhands.recipes.base import Recipe
from manyhands.recipes.layerwise import Lamb, Lars, Norms, local_norms

NORMALISATIONS = (
    nn.modules.batchnorm._NormBase,  # batch, synchronised batch and instance normalisation
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
FUSED_DEVICES = ("cpu", "cuda")  # one kernel for all tensors: twice as fast as torch's loop on a CPU


def undecayed(model: nn.Module) -> set[str]:
    """The names of all biases and of all parameters of normalisation layers."""
    spared = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(module, NORMALISATIONS) or _is_bias(name)
    }
    # by identity first, so that a tied parameter is spared under each of its names
    everything = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in everything if id(parameter) in spared}


def build(
    recipe: Recipe,
    named_parameters: Iterable[tuple[str, Tensor]],
    undecayed: Collection[str],
    norms: Norms = local_norms,
) -> Optimizer:
    """The recipe's optimiser over these tensors, in a decayed and an undecayed group (an empty one left out).

    Frozen parameters are left out and tied ones taken once. Plain tensors are taken as they are: slices of a
    flat buffer need no autograd, only their `.grad`. A group's `names` run parallel to its `params`. The rate
    is the recipe's `lr` until `set_rate` says otherwise.
    """
    groups = _groups(recipe, _trained(named_parameters), undecayed)
    if not groups:
        raise UsageError("there is nothing to train: the model has no parameter that requires a gradient")
    betas = (recipe.beta1, recipe.beta2)
    match recipe.optimizer:
        case "sgd":
            return _sgd(recipe, groups)
        case "adam":
            return Adam(groups, lr=recipe.lr, betas=betas, fused=_fusable(groups))
        case "adamw":
            return AdamW(groups, lr=recipe.lr, betas=betas, fused=_fusable(groups))
        case "lars":
            coefficient = recipe.coefficient
            return Lars(groups, recipe.lr, momentum=recipe.momentum, coefficient=coefficient, norms=norms)
        case "lamb":
            return Lamb(groups, recipe.lr, betas=betas, clamp=recipe.clamp, norms=norms)


def set_rate(optimizer: Optimizer, lr: float) -> None:
    """Use this learning rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def _is_bias(name: str) -> bool:
    # recurrent layers have bias_ih_l0, attention has in_proj_bias
    return name == "bias" or name.startswith("bias_") or name.endswith("_bias")


def _trained(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    seen: set[int] = set()
    trained: dict[str, Tensor] = {}
    for name, tensor in named_parameters:
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if not frozen and id(tensor) not in seen:
            seen.add(id(tensor))
            trained[name] = tensor
    return trained


def _groups(recipe: Recipe, trained: dict[str, Tensor], undecayed: Collection[str]) -> list[dict[str, Any]]:
    decayed = [name for name in trained if name not in undecayed]
    spared = [name for name in trained if name in undecayed]
    groups = [_group(trained, decayed, recipe.weight_decay), _group(trained, spared, 0.0)]
    if recipe.optimizer in ("lars", "lamb"):
        for group, layerwise in zip(groups, (True, False), strict=True):
            group["layerwise"] = layerwise
    return [group for group in groups if group["params"]]


def _group(trained: dict[str, Tensor], names: list[str], weight_decay: float) -> dict[str, Any]:
    return {"params": [trained[name] for name in names], "names": names, "weight_decay": weight_decay}


def _fusable(groups: list[dict[str, Any]]) -> bool | None:
    tensors = [tensor for group in groups for tensor in group["params"]]
    fits = all(tensor.is_floating_point() and tensor.device.type in FUSED_DEVICES for tensor in tensors)
    return True if fits else None  # None lets torch choose


def _sgd(recipe: Recipe, groups: list[dict[str, Any]]) -> SGD:
    # torch keeps the rate out of the momentum buffer, v <- momentum v + g and w <- w - lr v, so that Goyal's
    # momentum correction is built in
    optimizer = SGD(
        groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov, fused=_fusable(groups)
    )
    if recipe.momentum:
        # torch's fused kernel fails when a tensor gets its first gradient later than the others; starting
        # every buffer at zero is the same arithmetic
        for group in groups:
            for tensor in group["params"]:
                optimizer.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)
    return optimizer
