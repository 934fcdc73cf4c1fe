"""A model as a sequence of blocks, and what each of them costs in time and memory."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyhands.core.errors import UsageError, kind_of
from manyhands.data import trees
from manyhands.data.call import call
from manyhands.data.trees import Layout, Tree
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
    layout: Layout | None = None  # of the outputs, if they can be sent to another process

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
        f"the model, {kind_of(model)}, cannot be divided into blocks: it is not an nn.Sequential and has no "
        "method blocks() that returns its modules in order"
    )


def enter(model: nn.Module, first: nn.Module, inputs: Tree) -> Tree:
    """Call the first block of a model with the inputs of the model.

    A sequence passes its inputs on to its first member as they are. Otherwise the first block takes a dict or
    a tuple as the model does. Every later block gets what the one before returned, as in a sequence.
    """
    return first(inputs) if type(model).forward is nn.Sequential.forward else call(first, inputs)


class Entered(nn.Module):
    """The first block of a model as a module that takes the inputs of the model as one argument."""

    def __init__(self, model: nn.Module, first: nn.Module) -> None:
        super().__init__()
        self.first = first
        self._model = (model,)  # in a tuple, so that it is not a member

    def forward(self, inputs: Tree) -> Tree:
        return enter(self._model[0], self.first, inputs)


def joined(blocks: Sequence[nn.Module]) -> set[int]:
    """The blocks (by index) with which no stage can begin, because blocks around it share a parameter."""
    users: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            users.setdefault(id(parameter), []).append(number)
    return {border for numbers in users.values() for border in range(min(numbers) + 1, max(numbers) + 1)}


def measure(model: nn.Module, inputs: Tree, rounds: int = ROUNDS) -> list[Cost]:
    """Measure each block with the outputs of the one before it. The model and random states do not change.

    Raises an error if the composition of the blocks is not the model.
    """
    blocks = blocks_of(model)
    devices = {tensor.device for tensor in trees.tensors(inputs) if tensor.is_cuda}
    with torch.random.fork_rng(devices=devices):
        _check_composition(model, blocks, inputs)
        costs, views = [], []
        # without their gradient, the backward of the first layer takes half the time
        inputs = trees.mapped(Tensor.detach, inputs)
        for number, block in enumerate(blocks):
            # a copy, so that neither gradients nor running statistics of the model change
            name, copied = f"{number} {type(block).__name__}", copy.deepcopy(block)
            run = nn.Module.__call__ if number else partial(enter, model)
            cost, inputs, view = _measure(name, copied, run, inputs, rounds)
            costs.append(cost)
            views.append(view)
    for number in reversed(range(len(blocks) - 1)):
        if views[number] and not costs[number + 1].alone:  # the next block writes to the inputs of this one
            costs[number] = costs[number]._replace(alone=False)
    return costs


def _check_composition(model: nn.Module, blocks: Sequence[nn.Module], inputs: Tree) -> None:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode():
            few = trees.rows(inputs, slice(0, 2))
            whole = call(model, trees.mapped(Tensor.clone, few))  # a first block may overwrite its inputs
            parts = trees.mapped(Tensor.clone, few)
            for number, block in enumerate(blocks):
                parts = block(parts) if number else enter(model, block, parts)
                if not trees.tensors(parts):
                    raise UsageError(
                        f"block {number} ({type(block).__name__}) returns {kind_of(parts)}: "
                        "blocks must return tensors"
                    )
            if not trees.equal(whole, parts):
                raise UsageError(
                    f"the blocks of {type(model).__name__} in sequence do not give the outputs of the model"
                )
    finally:
        for module, training in modes:
            module.training = training


def _measure(
    name: str, block: nn.Module, run: Callable[[nn.Module, Tree], Tree], inputs: Tree, rounds: int
) -> tuple[Cost, Tree, bool]:
    """The cost of a block, its outputs, and whether they share the memory of its inputs."""
    held = {p.untyped_storage().data_ptr() for p in (*block.parameters(), *block.buffers())}
    alone, forwards, backwards, copies = True, [], [], []
    outputs, saved, view = inputs, 0, False
    for number in range(rounds + 1):
        # the first round allocates memory, chooses kernels, and shows whether a stage could begin here
        leaf = trees.mapped(lambda t, first=number == 0: _leaf(t, first), inputs)  # type: ignore[misc]
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
                outputs = run(block, leaf if alone else trees.mapped(Tensor.clone, leaf))
            except RuntimeError as error:
                if "in-place" not in str(error) or not alone:
                    raise
                alone = False
                outputs = run(block, trees.mapped(Tensor.clone, leaf))
        _finish(inputs)
        forwards.append(time.perf_counter() - since)
        view = bool(_storages(outputs) & _storages(leaf))
        saved = sum(kept.values())
        held_outputs = trees.tensors(outputs)
        copied = [torch.empty_like(tensor) for tensor in held_outputs]
        since = time.perf_counter()
        for copy_, tensor in zip(copied, held_outputs, strict=True):
            copy_.copy_(tensor.detach())
        _finish(inputs)
        copies.append(time.perf_counter() - since)
        if trained := [tensor for tensor in held_outputs if tensor.requires_grad]:
            gradients = [torch.ones_like(tensor) for tensor in trained]
            since = time.perf_counter()
            torch.autograd.backward(trained, gradients)
            _finish(inputs)
            backwards.append(time.perf_counter() - since)
    cost = Cost(
        name,
        min(forwards[1:]),
        min(backwards[1:], default=0.0),
        saved,
        sum(tensor.nbytes for tensor in trees.tensors(outputs)),
        min(copies[1:]),
        sum(parameter.numel() for parameter in block.parameters()),
        alone,
        Layout.of(outputs),
    )
    return cost, trees.mapped(lambda t: t.detach().requires_grad_(t.requires_grad), outputs), view


def _leaf(tensor: Tensor, first: bool) -> Tensor:
    wanted = tensor.requires_grad or (first and tensor.is_floating_point())
    return tensor.detach().clone().requires_grad_(wanted)


def _storages(tree: Tree) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in trees.tensors(tree)}


def _finish(tree: Tree) -> None:
    for device in {tensor.device for tensor in trees.tensors(tree)}:
        of(device).synchronize()
