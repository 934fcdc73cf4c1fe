"""Whether every parameter has a gradient after every backward pass, as far as a model's structure tells.

A sequence of torch's own layers has one way through it, and each layer uses all it has; so what a loss asks
of the output reaches every parameter. Nothing can be told of anybody's own `forward`: what it leaves out may
depend on the data, on chance or on the step, so what one step used says nothing of the next.
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
    """True only where it is certain, for this model and all within it."""
    if _altered(model):
        return False
    members = list(model.children())
    if type(model) is nn.Sequential or _promises(model):
        return not model._parameters and all(all_used(member) for member in members)
    return type(model) in _LAYERS and not members and set(model._parameters) <= _OWN


def _promises(module: nn.Module) -> bool:
    """A module of this package that puts each call through all its members; others' word is not checked."""
    kind = type(module)
    return kind.__module__.startswith("manyhands.") and bool(vars(kind).get("uses_all_members", False))


def _altered(module: nn.Module) -> bool:
    """Whether a call does something else than its class says."""
    forward = module._forward_hooks or module._forward_pre_hooks
    backward = module._backward_hooks or module._backward_pre_hooks
    return bool(forward or backward) or "forward" in vars(module)
