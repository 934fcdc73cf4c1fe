"""How a model takes its inputs: one argument, or a dict as keywords and a tuple as positions.

`forward(self, input_ids, attention_mask)` takes {"input_ids": ..., "attention_mask": ...} or a tuple of two.
`forward(self, batch)` takes the same dict as one argument: its parameters have other names.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from manyhands.data.trees import Tree

_spread: WeakKeyDictionary[nn.Module, dict[Any, bool]] = WeakKeyDictionary()


def call(module: nn.Module, inputs: Tree) -> Tree:
    """Call a module with the inputs of a batch."""
    if isinstance(inputs, Tensor) or not isinstance(inputs, Mapping | tuple | list):
        return module(inputs)
    if not spreads(module, inputs):
        return module(inputs)
    return module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)


def spreads(module: nn.Module, inputs: Tree) -> bool:
    """Whether a dict or tuple becomes several arguments: if the module's `forward` accepts them."""
    decided = _spread.setdefault(module, {})
    kind = tuple(inputs) if isinstance(inputs, Mapping) else len(inputs)
    if kind not in decided:
        decided[kind] = _accepts(module, inputs)
    return decided[kind]


def _accepts(module: nn.Module, inputs: Tree) -> bool:
    if getattr(module, "one_value", False):  # of any structure, as Keras models have it
        return False
    plain = module
    while isinstance(inner := getattr(plain, "module", None), nn.Module) and _wraps(plain):
        plain = inner
    if isinstance(inputs, tuple | list) and hasattr(inputs, "_fields"):
        return False  # a named tuple is one value
    keywords = isinstance(inputs, Mapping)
    if keywords and not all(isinstance(name, str) for name in inputs):
        return False
    try:
        signature = inspect.signature(plain.forward)
        signature.bind(**inputs) if keywords else signature.bind(*inputs)
    except (TypeError, ValueError):  # it does not, or it has no signature
        return False
    return True


def _wraps(module: nn.Module) -> bool:
    """Whether it is one of torch's wrappers, whose own `forward` accepts anything."""
    return type(module).__module__.startswith("torch.") and not isinstance(module, nn.Sequential)
