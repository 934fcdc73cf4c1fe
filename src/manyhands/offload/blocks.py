"""A model as a sequence of blocks, and what each of them costs in time and memory."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyhands.core.errors import UsageError
from manyhands.devices.device import of

ROUNDS = 3  # measurements, of which the shortest counts


class Cost(NamedTuple):
    """The cost of one block for the samples it was measured with."""

    name: str
    forward: float  # seconds
    backward: float
    saved: int  # bytes that autograd keeps for backward, parameters left out
    outputs: int  # bytes
    copying: float  # seconds to copy the outputs
    parameters: int  # elements
    alone: bool  # false if its inputs are changed in place, by it or later: no stage can begin with it

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model, whose composition is the model. An error says why it has none.

    The blocks of a sequence are its members. Any other model lists its blocks, in order, with a method
    `blocks`.
    """
    named = getattr(model, "blocks", None)
    if callable(named) and not isinstance(named, nn.Module):
        found = list(named())
        if not found or not all(isinstance(block, nn.Module) for block in found):
            raise UsageError(
                f"{type(model).__name__}.blocks() must return modules in order, got {found!r:.80}"
            )
        return found
    if isinstance(model, nn.Sequential):
        if not len(model):
            raise UsageError("an empty nn.Sequential cannot be divided into blocks")
        only = model[0]
        return blocks_of(only) if len(model) == 1 and isinstance(only, nn.Sequential) else list(model)
    raise UsageError(
        f"a {type(model).__name__} cannot be divided into blocks: it is not an nn.Sequential and has no "
        "method blocks() that returns its modules in order"
    )


def joined(blocks: Sequence[nn.Module]) -> set[int]:
    """The blocks (by index) with which no stage can begin, because blocks around it share a parameter."""
    users: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            users.setdefault(id(parameter), []).append(number)
    return {border for numbers in users.values() for border in range(min(numbers) + 1, max(numbers) + 1)}


def measure(model: nn.Module, inputs: Tensor, rounds: int = ROUNDS) -> list[Cost]:
    """Measure each block with the outputs of the one before it. The model and random states do not change.

    Raises an error if the composition of the blocks is not the model.
    """
    blocks = blocks_of(model)
    devices = [inputs.device] if inputs.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        _check_composition(model, blocks, inputs)
        costs, views = [], []
        inputs = (
            inputs.detach()
        )  # without their gradient, the backward of the first layer takes half the time
        for number, block in enumerate(blocks):
            # a copy, so that neither gradients nor running statistics of the model change
            name = f"{number} {type(block).__name__}"
            cost, inputs, view = _measure(name, copy.deepcopy(block), inputs, rounds)
            costs.append(cost)
            views.append(view)
    for number in reversed(range(len(blocks) - 1)):
        if views[number] and not costs[number + 1].alone:  # the next block writes to the inputs of this one
            costs[number] = costs[number]._replace(alone=False)
    return costs


def _check_composition(model: nn.Module, blocks: Sequence[nn.Module], inputs: Tensor) -> None:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode():
            whole = model(inputs[:2].clone())  # a first block may overwrite its inputs
            parts = inputs[:2].clone()
            for number, block in enumerate(blocks):
                parts = block(parts)
                if not isinstance(parts, Tensor):
                    raise UsageError(
                        f"block {number} ({type(block).__name__}) returns a {type(parts).__name__}: "
                        "blocks must return one tensor"
                    )
            if whole.shape != parts.shape or not torch.equal(whole, parts):
                raise UsageError(
                    f"the blocks of {type(model).__name__} in sequence do not give the outputs of the model"
                )
    finally:
        for module, training in modes:
            module.training = training


def _measure(name: str, block: nn.Module, inputs: Tensor, rounds: int) -> tuple[Cost, Tensor, bool]:
    """The cost of a block, its outputs, and whether they share the memory of its inputs."""
    held = {p.untyped_storage().data_ptr() for p in (*block.parameters(), *block.buffers())}
    alone, forwards, backwards, copies = True, [], [], []
    outputs, saved, view = inputs, 0, False
    for number in range(rounds + 1):
        # the first round allocates memory, chooses kernels, and shows whether a stage could begin here
        wanted = inputs.requires_grad or (number == 0 and inputs.is_floating_point())
        leaf = inputs.detach().clone().requires_grad_(wanted)
        kept: dict[int, int] = {}

        def pack(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in held:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        _finish(inputs)
        since = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            try:
                outputs = block(leaf if alone else leaf.clone())
            except RuntimeError as error:
                if "in-place" not in str(error) or not alone:
                    raise
                alone = False
                outputs = block(leaf.clone())
        _finish(inputs)
        forwards.append(time.perf_counter() - since)
        view = outputs.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()
        saved = sum(kept.values())
        copied = torch.empty_like(outputs)
        since = time.perf_counter()
        copied.copy_(outputs.detach())
        _finish(inputs)
        copies.append(time.perf_counter() - since)
        if outputs.requires_grad:
            gradient = torch.ones_like(outputs)
            since = time.perf_counter()
            outputs.backward(gradient)
            _finish(inputs)
            backwards.append(time.perf_counter() - since)
    cost = Cost(
        name,
        min(forwards[1:]),
        min(backwards[1:], default=0.0),
        saved,
        outputs.nbytes,
        min(copies[1:]),
        sum(parameter.numel() for parameter in block.parameters()),
        alone,
    )
    return cost, outputs.detach().requires_grad_(outputs.requires_grad), view


def _finish(tensor: Tensor) -> None:
    of(tensor.device).synchronize()
