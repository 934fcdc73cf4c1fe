"""What a model would save for backward, found without computing it, and the times of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd

from manyhands.core.errors import UsageError
from manyhands.data import trees
from manyhands.data.trees import Tree
from manyhands.offload.blocks import Entered, blocks_of, measure


class Unit(NamedTuple):
    """A part of a model that is called by itself, with the samples of one pass."""

    inputs: int  # bytes
    outputs: int
    own: int  # bytes it saves that are neither its inputs nor its outputs
    saves_inputs: bool
    saves_outputs: bool
    same: bool  # whether its outputs share the memory of its inputs
    work: int = 0  # bytes while it works, besides what it saves: gradients and buffers of kernels
    forward: float = 0.0  # seconds
    backward: float = 0.0
    alone: bool = True  # false if it changes its inputs in place
    largest: int = 0  # bytes of the largest tensor it saves

    @property
    def touched(self) -> int:
        """Bytes of what it saves, also if another unit has saved them before."""
        inputs = self.inputs if self.saves_inputs and not (self.same and self.saves_outputs) else 0
        return self.own + inputs + (self.outputs if self.saves_outputs else 0)

    @property
    def at_once(self) -> int:
        """Bytes of what it saves that backward needs at the same time, if each is loaded when needed."""
        return min(self.touched, 2 * self.largest) if self.largest else self.touched

    def lean(self) -> Unit:
        """The same if only activations count: during forward, inputs and outputs are in memory together."""
        both = self.outputs if self.same else self.inputs + self.outputs
        return self._replace(work=max(0, both - self.at_once))


def units_of(module: nn.Module, *, several_inputs: bool = False) -> list[nn.Module]:
    """The smallest modules whose composition is the module. One that cannot be divided is one unit.

    They are called one after the other, so that no outer module holds their inputs. With `several_inputs` the
    first block is not divided: it takes them as the module does.
    """
    if several_inputs:
        try:
            first, *others = [module] if _hooked(module) else blocks_of(module)
        except UsageError:
            first, others = module, []
        return [Entered(module, first), *(unit for block in others for unit in units_of(block))]
    if _hooked(module):
        return [module]
    if type(module) is nn.Sequential and len(module):
        return [unit for member in module for unit in units_of(member)]
    try:
        blocks = blocks_of(module)
    except UsageError:
        return [module]
    return [unit for block in blocks for unit in (units_of(block) if block is not module else [block])]


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def sizes(units: Sequence[nn.Module], inputs: Tree) -> list[Unit] | None:
    """What each unit would save, found by calling it with meta tensors.

    None if that is not possible, because a model reads the values of a tensor.
    """
    try:
        return _sizes(units, inputs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None


def _sizes(units: Sequence[nn.Module], inputs: Tree) -> list[Unit]:
    found = []
    tree = trees.mapped(_meta_input, inputs)
    with torch.random.fork_rng(devices=[]):
        for module in units:
            unit, tree = _size(module, tree)
            found.append(unit)
    # the caller holds the first inputs anyway, and seldom needs their gradient
    wanted = any(tensor.requires_grad for tensor in trees.tensors(inputs))
    return [found[0]._replace(inputs=found[0].inputs if wanted else 0), *found[1:]]


def _meta_input(tensor: Tensor) -> Tensor:
    meta = tensor.to("meta")
    return (
        meta.requires_grad_() * 1 if tensor.requires_grad else meta
    )  # a unit may not change a leaf in place


def _size(module: nn.Module, inputs: Tree) -> tuple[Unit, Tree]:
    state: dict[str, Tensor] = {name: _meta(p) for name, p in module.named_parameters()}
    state |= {name: _meta(b) for name, b in module.named_buffers()}
    before = {tensor.untyped_storage()._cdata for tensor in trees.tensors(inputs)}
    own = {tensor.untyped_storage()._cdata for tensor in state.values()}
    saved: dict[int, Tensor] = {}  # references, so that the ids of storages are not reused

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and tensor.untyped_storage()._cdata not in own:
            saved[tensor.untyped_storage()._cdata] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs: Any = functional_call(module, state, (inputs,))
    after = {tensor.untyped_storage()._cdata for tensor in trees.tensors(outputs)}
    others = sum(t.untyped_storage().nbytes() for n, t in saved.items() if n not in before | after)
    received, made = (sum(tensor.nbytes for tensor in trees.tensors(tree)) for tree in (inputs, outputs))
    gradients = received + made
    # oneDNN copies the inputs and outputs of a convolution into its own layout
    kernels = gradients if any(isinstance(member, _ConvNd) for member in module.modules()) else 0
    unit = Unit(
        received,
        made,
        others,
        not before.isdisjoint(saved),
        not after.isdisjoint(saved),
        before == after,
        gradients + kernels,
        largest=max((tensor.untyped_storage().nbytes() for tensor in saved.values()), default=0),
    )
    return unit, outputs


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)


def timed(units: Sequence[nn.Module], inputs: Tree, share: int = 4) -> list[Unit]:
    """The units with their times, measured with a part of the samples to save memory."""
    size = trees.size(inputs)
    few = max(min(2, size), size // share)  # a batch norm needs two
    part = trees.rows(trees.mapped(Tensor.detach, inputs), slice(0, few))
    costs = measure(nn.Sequential(*units), part, rounds=1)
    scale = size / few
    found = sizes(units, inputs)
    if found is None:  # use the measured sizes; what two units save is counted twice
        found, before = [], 0
        for cost in costs:
            outputs, saved = int(scale * cost.outputs), int(scale * cost.saved)
            found.append(Unit(before, outputs, saved, False, False, False, 2 * (before + outputs)))
            before = outputs
    return [
        unit._replace(forward=cost.forward * scale, backward=cost.backward * scale, alone=cost.alone)
        for unit, cost in zip(found, costs, strict=True)
    ]
