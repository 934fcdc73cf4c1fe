"""A worker's state as whole tensors by name: `model/<tensor>` and `optimizer/<kind>/<parameter>`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core.errors import CheckpointError

Consolidate = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
Part = Callable[[str, Tensor], Tensor]


def pack(model: nn.Module, optimizer: Optimizer, consolidate: Consolidate = dict) -> dict[str, Tensor]:
    """Name every tensor that a step reads and writes.

    Where workers hold slices of the optimizer state, `consolidate` puts the slices of one kind together.
    """
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"optimizer/{kind}/{name}": value for kind, name, value in scalars(optimizer)}
    for kind, pieces in kinds(optimizer).items():
        tensors |= {f"optimizer/{kind}/{name}": tensor for name, tensor in consolidate(pieces).items()}
    return tensors


def kinds(optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """The optimizer state that is divided as the parameters are: by kind, then by parameter."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter, once in _named(optimizer):
        for kind, value in optimizer.state.get(parameter, {}).items():
            if kind not in once and isinstance(value, Tensor):  # SGD without momentum stores a None
                found.setdefault(kind, {})[name] = value
    return dict(sorted(found.items()))


def scalars(optimizer: Optimizer) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, parameter and value of what an optimizer keeps once per parameter; numbers become tensors.

    It is equal at every worker that has a part of the parameter: a count of steps, say.
    """
    for name, parameter, once in _named(optimizer):
        for kind, value in optimizer.state.get(parameter, {}).items():
            if kind in once and value is not None:
                yield kind, name, as_tensor(value)


def as_tensor(value: Tensor | float) -> Tensor:
    """A number as a tensor that holds all of it; a tensor as it is."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _everything(name: str, tensor: Tensor) -> Tensor:
    return tensor


def unpack(
    tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer, part: Part = _everything
) -> None:
    """Load a packed state, or this worker's `part` of it, into a model and an optimizer of its shapes."""
    unpack_model(tensors, model)
    unpack_optimizer(tensors, optimizer, part)


def unpack_model(tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Load the model of a packed state into one of the same shapes."""
    own = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    saved = {name for name in tensors if name.startswith("model/")}
    if odd := sorted(own.keys() ^ saved):
        raise CheckpointError(f"the checkpoint is of another model: {odd[0]} is in only one of them")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            shapes = f"{tuple(tensors[name].shape)} instead of {tuple(tensor.shape)}"
            raise CheckpointError(f"the checkpoint is of another model: {name} is {shapes}")
        tensor.copy_(tensors[name])


def unpack_optimizer(tensors: Mapping[str, Tensor], optimizer: Optimizer, part: Part = _everything) -> None:
    """Load the optimizer state of a packed state, or this worker's part of it."""
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, kind, name = key.split("/", 2)
            by_parameter.setdefault(name, {})[kind] = value
    for name, parameter, once in _named(optimizer):
        if name in by_parameter:
            optimizer.state[parameter] = {
                kind: _number(once[kind], value, parameter)
                if kind in once
                else part(name, value).to(parameter.device, copy=True)
                for kind, value in by_parameter[name].items()
            }


def _number(kind: str, value: Tensor, parameter: Tensor) -> Tensor | float:
    """What is kept once per parameter, as the optimizer had it: a tensor, or a number of Python."""
    return value.to(parameter.device, copy=True) if kind == "tensor" else value.item()


def _named(optimizer: Optimizer) -> list[tuple[str, Tensor, Mapping[str, str]]]:
    """Each parameter with its name, and with what the optimizer keeps once per parameter."""
    return [
        (name, parameter, group["scalars"])
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
    ]
