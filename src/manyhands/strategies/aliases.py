"""A parameter that a strategy does not train where a model may still reach it: who does so is refused.

FSDP puts shards in the place of a model's parameters, and a stage of a pipeline trains its own. A model that
keeps the very same parameters elsewhere too (in a list, in a closure) would go on computing with these: they
get gradients that nobody sums and updates that nobody makes, and the run would learn nothing in silence.
Wherever such a reference is kept, it shows in the first backward pass: a gradient arrives. Tensors that only
share a parameter's memory have no gradient of their own to show; those that modules keep are looked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from manyhands.core.errors import UsageError

_TORCHS = frozenset(vars(nn.Module()))  # attributes that every module has


def refuse_use(how: str, why: str, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """From now on, say of these parameters that a gradient has reached one, and why it must not."""
    for name, parameter in named:
        if parameter.requires_grad:
            parameter.register_hook(partial(_refuse, how, why, name))  # type: ignore[no-untyped-call]


def _refuse(how: str, why: str, name: str, gradient: Tensor) -> None:
    raise UsageError(
        f"this model cannot be trained {how}: it reaches the parameter {name} by another reference "
        f"than its module's (a list, a closure, another block), {why}: use it through its module, or take "
        "strategy allreduce"
    )


def refuse_views(model: nn.Module) -> None:
    """Refuse what a module keeps of a trained parameter's memory, such as `weight.data` or `weight.t()`.

    A strategy that lets parameters live elsewhere leaves it behind, with the values of the beginning.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and _lies(p)}
    owners = {parameter.untyped_storage().data_ptr(): name for name, parameter in trained.items()}
    places: dict[int, str] = {}
    for name, parameter in trained.items():
        if (other := places.setdefault(parameter.data_ptr(), name)) != name:
            raise UsageError(
                f"the parameters {other} and {name} are two that share one memory, and only strategy single "
                "trains that: assign the very same parameter to both modules"
            )
    own = {id(parameter) for parameter in model.parameters()}
    for path, module in model.named_modules():
        if module._forward_pre_hooks:
            continue  # what these keep is made anew before each forward pass, as by spectral_norm
        for attribute, tensor in _kept(module):
            if id(tensor) not in own and _lies(tensor):
                owner = owners.get(tensor.untyped_storage().data_ptr())
                if owner is not None:
                    kept = ".".join(filter(None, (path, attribute)))
                    raise UsageError(
                        f"{kept} lies in the memory of the parameter {owner} (such as .data, .detach() or a "
                        "view of it) and would not follow its training: make it in forward, or .clone() it, "
                        "or take strategy single"
                    )


def _kept(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors among a module's own attributes and buffers, also in lists and dictionaries."""
    held = {name: value for name, value in vars(module).items() if name not in _TORCHS} | module._buffers
    return [
        (name, leaf)
        for name, value in held.items()
        if isinstance(value, Tensor | list | tuple | dict)
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]


def _lies(tensor: Tensor) -> bool:
    """Whether it has memory that can be asked for."""
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return tensor.numel() > 0
