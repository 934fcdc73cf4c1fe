"""A worker's state as whole tensors by name: `model/<tensor>` and `optimizer/<what>/<parameter>`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.errors import CheckpointError


def pack(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Name every tensor that a step reads and writes."""
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in _named(optimizer):
        for what, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):  # SGD without momentum remembers a None
                tensors[f"optimizer/{what}/{name}"] = value
    return tensors


def unpack(tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
    """Put a packed state into a model and an optimiser of the same shapes."""
    own = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    saved = {name for name in tensors if name.startswith("model/")}
    if odd := sorted(own.keys() ^ saved):
        raise CheckpointError(f"the checkpoint is of another model: {odd[0]} is in only one of them")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            shapes = f"{tuple(tensors[name].shape)} instead of {tuple(tensor.shape)}"
            raise CheckpointError(f"the checkpoint is of another model: {name} is {shapes}")
        tensor.copy_(tensors[name])
    remembered: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, what, name = key.split("/", 2)
            remembered.setdefault(name, {})[what] = value
    for name, parameter in _named(optimizer):
        if name in remembered:
            optimizer.state[parameter] = {
                what: value.to(parameter.device, copy=True) for what, value in remembered[name].items()
            }


def _named(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    return [
        pair for group in optimizer.param_groups for pair in zip(group["names"], group["params"], strict=True)
    ]
