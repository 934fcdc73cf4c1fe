"""Modules that torch.compile has compiled: each at its first call, in place, so that names stay plain."""

from __future__ import annotations

from typing import final
from weakref import WeakSet

from torch import nn

from manyhands.data.call import call
from manyhands.data.trees import Tree


@final
class CompiledCalls:
    """Calls modules, compiled: the model, or the part of it that a worker has."""

    def __init__(self) -> None:
        self._compiled: WeakSet[nn.Module] = WeakSet()

    def __call__(self, module: nn.Module, inputs: Tree) -> Tree:
        """The outputs of a module."""
        if module not in self._compiled:
            nn.Module.compile(module)  # not module.compile, which may be another method of its class
            self._compiled.add(module)
        return call(module, inputs)
