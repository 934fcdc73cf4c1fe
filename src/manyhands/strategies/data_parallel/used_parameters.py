"""Whether every parameter gets a gradient in every backward pass, judged by a model's structure.

A sequence of torch's own layers has one path through it, and each layer uses all of its parameters; so the
gradient of the loss reaches every parameter. A user's own `forward` can leave out parameters depending on the
data, on chance or on the step, so nothing is assumed about it: one step says nothing about the next.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules import (
    activation,
    batchnorm,
    conv,
    dropout,
    flatten,
    instancenorm,
    normalization,
    padding,
    pooling,
    upsampling,
)

_KINDS = (
    activation, batchnorm, conv, dropout, flatten, instancenorm, normalization, padding, pooling, upsampling,
)  # fmt: skip
_LAYERS = {
    layer
    for members in _KINDS
    for layer in vars(members).values()
    if isinstance(layer, type) and issubclass(layer, nn.Module) and layer.__module__ == members.__name__
} - {nn.MultiheadAttention}
_LAYERS |= {nn.Linear, nn.Identity, nn.Embedding}
_OWN = {"weight", "bias"}  # parameters that torch's layers have and use


def all_used(model: nn.Module) -> bool:
    """True only where it is certain, for this model and every module in it."""
    if _altered(model):
        return False
    members = list(model.children())
    if type(model) is nn.Sequential or _promises(model):
        return not model._parameters and all(all_used(member) for member in members)
    return type(model) in _LAYERS and not members and set(model._parameters) <= _OWN


def _promises(module: nn.Module) -> bool:
    """Whether this is a module of this package that declares that each call uses all its members."""
    kind = type(module)
    return kind.__module__.startswith("manyhands.") and bool(vars(kind).get("uses_all_members", False))


def _altered(module: nn.Module) -> bool:
    """Whether hooks or a replaced `forward` change what a call does."""
    forward = module._forward_hooks or module._forward_pre_hooks
    backward = module._backward_hooks or module._backward_pre_hooks
    return bool(forward or backward) or "forward" in vars(module)
