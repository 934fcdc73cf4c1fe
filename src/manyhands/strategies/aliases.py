"""Refuses models that reach a parameter by another reference than the one that a strategy trains.

FSDP replaces a model's parameters by shards, and a stage of a pipeline trains only its own. A model that
keeps the very same parameters elsewhere too (in a list, in a closure) would go on computing with the old
ones: their gradients are summed by no worker, they are never updated, and the run would silently learn
nothing. Wherever such a reference is kept, it shows in the first backward pass, because a gradient arrives.
Tensors that only share a parameter's memory have no gradient of their own; modules are searched for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from manyhands.core.errors import UsageError

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # attributes that every module has


def refuse_use(how: str, why: str, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """From now on, raise an error when a gradient reaches one of these parameters."""
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
    """Refuse tensors that a module keeps in a trained parameter's memory, such as `weight.t()`.

    A strategy that moves parameters to other memory leaves such a tensor behind, with the initial values.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and _has_memory(p)}
    owners = {parameter.untyped_storage().data_ptr(): name for name, parameter in trained.items()}
    by_address: dict[int, str] = {}
    for name, parameter in trained.items():
        if (other := by_address.setdefault(parameter.data_ptr(), name)) != name:
            raise UsageError(
                f"the parameters {other} and {name} are two that share one memory, and only strategy single "
                "trains that: assign the very same parameter to both modules"
            )
    parameters = {id(parameter) for parameter in model.parameters()}
    for path, module in model.named_modules():
        if module._forward_pre_hooks:
            continue  # these hooks make such tensors anew before each forward pass, as spectral_norm does
        for attribute, tensor in _own_tensors(module):
            if id(tensor) not in parameters and _has_memory(tensor):
                owner = owners.get(tensor.untyped_storage().data_ptr())
                if owner is not None:
                    kept = ".".join(filter(None, (path, attribute)))
                    raise UsageError(
                        f"{kept} lies in the memory of the parameter {owner} (such as .data, .detach() or a "
                        "view of it) and would not follow its training: make it in forward, or .clone() it, "
                        "or take strategy single"
                    )


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors among a module's own attributes and buffers, also inside lists and dictionaries."""
    held = {name: value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES}
    return [
        (name, leaf)
        for name, value in (held | module._buffers).items()
        if isinstance(value, Tensor | list | tuple | dict)
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]


def _has_memory(tensor: Tensor) -> bool:
    """Whether the tensor has memory whose address can be read."""
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return tensor.numel() > 0
