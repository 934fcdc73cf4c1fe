"""Weights to start from, with `--init`: safetensors, or a state dict that torch has saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from manyhands.core.errors import UsageError

SHOWN = 3  # names in a sentence


def read(path: str) -> dict[str, Tensor]:
    """The tensors of a file; nothing in it is executed."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UsageError(f"there is no file {path} to start from (--init)")
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 (whatever torch says of a file that is something else)
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"{path} is neither safetensors nor a state dict that torch.save has written (--init): {why:.120}"
        ) from None
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]  # as several trainers save it
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UsageError(f"{path} holds a {type(found).__name__}, not a state dict of tensors (--init)")
    return {str(name): tensor for name, tensor in found.items()}


def load(model: nn.Module, path: str) -> None:
    """Start a model from a file, or say which tensors do not fit."""
    found, own = read(path), model.state_dict()
    shapes = [
        f"{name} {tuple(found[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in found and found[name].shape != tensor.shape
    ]
    faults = {
        "lacks": [name for name in own if name not in found],
        "has besides": [name for name in found if name not in own],
        "has": shapes,
    }
    told = [f"{what} {_listed(names)}" for what, names in faults.items() if names]
    if told:
        raise UsageError(f"{path} is of another model (--init): it {', and '.join(told)}")
    model.load_state_dict(found)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
