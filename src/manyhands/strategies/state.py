"""A worker's state as whole tensors by name: `model/<tensor>` and `optimizer/<what>/<parameter>`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core.errors import CheckpointError

_COUNTERS = ("step",)  # one number a parameter, the same at every worker; the rest has the parameter's shape
Whole = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
Part = Callable[[str, Tensor], Tensor]


def pack(model: nn.Module, optimizer: Optimizer, whole: Whole = dict) -> dict[str, Tensor]:
    """Name every tensor that a step reads and writes.

    Where workers hold slices of the optimizer's state, `whole` puts the slices of one kind together.
    """
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in _named(optimizer):
        for what, value in optimizer.state.get(parameter, {}).items():
            if what in _COUNTERS:
                tensors[f"optimizer/{what}/{name}"] = value
    for what, pieces in kinds(optimizer).items():
        tensors |= {f"optimizer/{what}/{name}": tensor for name, tensor in whole(pieces).items()}
    return tensors


def kinds(optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """What an optimizer remembers of the parameters, in their shapes: by kind, then by parameter."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in _named(optimizer):
        for what, value in optimizer.state.get(parameter, {}).items():
            if what not in _COUNTERS and isinstance(value, Tensor):  # SGD without momentum remembers a None
                found.setdefault(what, {})[name] = value
    return dict(sorted(found.items()))


def _everything(name: str, tensor: Tensor) -> Tensor:
    return tensor


def unpack(
    tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer, part: Part = _everything
) -> None:
    """Put a packed state into a model and an optimizer of the same shapes, or this worker's `part` of it."""
    unpack_model(tensors, model)
    unpack_optimizer(tensors, optimizer, part)


def unpack_model(tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Put a packed state's model into one of the same shapes."""
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
    """Put a packed state's memory, or this worker's part of it, into an optimizer of the same parameters."""
    remembered: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, what, name = key.split("/", 2)
            remembered.setdefault(name, {})[what] = value
    for name, parameter in _named(optimizer):
        if name in remembered:
            optimizer.state[parameter] = {
                what: (value if what in _COUNTERS else part(name, value)).to(parameter.device, copy=True)
                for what, value in remembered[name].items()
            }


def _named(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    return [
        pair for group in optimizer.param_groups for pair in zip(group["names"], group["params"], strict=True)
    ]
