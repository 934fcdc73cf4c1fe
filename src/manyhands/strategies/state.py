"""A worker's state as whole tensors by name: `model/<tensor>` and `optimizer/<kind>/<parameter>`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core.errors import CheckpointError

_COUNTERS = ("step",)  # one number per parameter, equal at every worker; the rest has the parameter's shape
Consolidate = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
Part = Callable[[str, Tensor], Tensor]


def pack(model: nn.Module, optimizer: Optimizer, consolidate: Consolidate = dict) -> dict[str, Tensor]:
    """Name every tensor that a step reads and writes.

    Where workers hold slices of the optimizer state, `consolidate` puts the slices of one kind together.
    """
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in _named(optimizer):
        for kind, value in optimizer.state.get(parameter, {}).items():
            if kind in _COUNTERS:
                tensors[f"optimizer/{kind}/{name}"] = value
    for kind, pieces in kinds(optimizer).items():
        tensors |= {f"optimizer/{kind}/{name}": tensor for name, tensor in consolidate(pieces).items()}
    return tensors


def kinds(optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """The optimizer state that has the shapes of the parameters: by kind, then by parameter."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in _named(optimizer):
        for kind, value in optimizer.state.get(parameter, {}).items():
            if kind not in _COUNTERS and isinstance(value, Tensor):  # SGD without momentum stores a None
                found.setdefault(kind, {})[name] = value
    return dict(sorted(found.items()))


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
    for name, parameter in _named(optimizer):
        if name in by_parameter:
            optimizer.state[parameter] = {
                kind: (value if kind in _COUNTERS else part(name, value)).to(parameter.device, copy=True)
                for kind, value in by_parameter[name].items()
            }


def _named(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    return [
        pair for group in optimizer.param_groups for pair in zip(group["names"], group["params"], strict=True)
    ]
