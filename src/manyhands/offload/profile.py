"""What a model would save for backward, found without computing it, and what each part of it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd

from manyhands.core.errors import UsageError
from manyhands.offload.blocks import blocks_of, measure


class Unit(NamedTuple):
    """A part of a model that is called by itself, for the samples of one pass."""

    inputs: int  # bytes
    outputs: int
    own: int  # bytes it saves that are neither its inputs nor its outputs
    saves_inputs: bool
    saves_outputs: bool
    same: bool  # whether its outputs are its inputs' memory
    work: int = 0  # bytes while it works, beside what it saves: gradients, and room that kernels take
    forward: float = 0.0  # seconds
    backward: float = 0.0
    alone: bool = True  # false where it changes its inputs in place
    largest: int = 0  # bytes of the largest tensor it saves

    @property
    def touched(self) -> int:
        """Bytes of what it saves, whoever saved them first."""
        inputs = self.inputs if self.saves_inputs and not (self.same and self.saves_outputs) else 0
        return self.own + inputs + (self.outputs if self.saves_outputs else 0)

    @property
    def at_once(self) -> int:
        """Bytes of what it saves that backward needs at a time, where each comes as it is asked for."""
        return min(self.touched, 2 * self.largest) if self.largest else self.touched

    def lean(self) -> Unit:
        """The same where activations alone count: going forward, inputs and outputs are there at once."""
        both = self.outputs if self.same else self.inputs + self.outputs
        return self._replace(work=max(0, both - self.at_once))


def units_of(module: nn.Module) -> list[nn.Module]:
    """The smallest modules whose composition it is; one that cannot be cut is one unit.

    Called one after the other, none of them is inside another that would hold its inputs meanwhile.
    """
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


def sizes(units: Sequence[nn.Module], inputs: Tensor) -> list[Unit] | None:
    """What each unit would save, by calling it with tensors that have a shape but no memory.

    None where that is not possible: a model may ask for the numbers in a tensor.
    """
    try:
        return _sizes(units, inputs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None


def _sizes(units: Sequence[nn.Module], inputs: Tensor) -> list[Unit]:
    found = []
    flowing = inputs.to("meta")
    if inputs.requires_grad:
        flowing = flowing.requires_grad_() * 1  # a unit that works in place may not change a leaf
    with torch.random.fork_rng(devices=[]):
        for module in units:
            unit, flowing = _size(module, flowing)
            found.append(unit)
    # the caller holds the first one's inputs anyway, and seldom asks for their gradient
    return [found[0]._replace(inputs=found[0].inputs if inputs.requires_grad else 0), *found[1:]]


def _size(module: nn.Module, inputs: Tensor) -> tuple[Unit, Tensor]:
    state: dict[str, Tensor] = {name: _ghost(p) for name, p in module.named_parameters()}
    state |= {name: _ghost(b) for name, b in module.named_buffers()}
    before = inputs.untyped_storage()._cdata
    own = {tensor.untyped_storage()._cdata for tensor in state.values()}
    saved: dict[int, Tensor] = {}  # holding the tensors keeps the numbers of their storages apart

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and tensor.untyped_storage()._cdata not in own:
            saved[tensor.untyped_storage()._cdata] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs: Any = functional_call(module, state, (inputs,))
    if not isinstance(outputs, Tensor):
        raise UsageError(f"a {type(module).__name__} gives a {type(outputs).__name__}, not one tensor")
    after = outputs.untyped_storage()._cdata
    others = sum(t.untyped_storage().nbytes() for n, t in saved.items() if n not in (before, after))
    gradients = inputs.nbytes + outputs.nbytes
    # oneDNN copies what a convolution reads and writes into a layout of its own
    kernels = gradients if any(isinstance(member, _ConvNd) for member in module.modules()) else 0
    unit = Unit(
        inputs.nbytes,
        outputs.nbytes,
        others,
        before in saved,
        after in saved,
        before == after,
        gradients + kernels,
        largest=max((tensor.untyped_storage().nbytes() for tensor in saved.values()), default=0),
    )
    return unit, outputs


def _ghost(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)


def timed(units: Sequence[nn.Module], inputs: Tensor, share: int = 4) -> list[Unit]:
    """The units with their times, measured with a part of the samples so as to take a part of the memory."""
    few = max(min(2, len(inputs)), len(inputs) // share)  # a norm needs two
    costs = measure(nn.Sequential(*units), inputs.detach()[:few], rounds=1)
    scale = len(inputs) / few
    known = sizes(units, inputs)
    if known is None:  # then as it was measured; what two units save is counted twice
        known, before = [], 0
        for cost in costs:
            outputs, saved = int(scale * cost.outputs), int(scale * cost.saved)
            known.append(Unit(before, outputs, saved, False, False, False, 2 * (before + outputs)))
            before = outputs
    return [
        unit._replace(forward=cost.forward * scale, backward=cost.backward * scale, alone=cost.alone)
        for unit, cost in zip(known, costs, strict=True)
    ]
