"""Weights to start from, with `--init`: safetensors, or a state dict that torch has saved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from manyhands.core import formatting
from manyhands.core.errors import UsageError, kind_of

HOLDERS = ("state_dict", "model_state_dict", "model")  # keys of checkpoints under which the tensors are
WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before every name


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
        plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
        why = re.split(r"\.\s|\n", plain)[0] or type(error).__name__
        raise UsageError(
            f"{path} is neither safetensors nor a state dict that torch.save has written (--init): {why:.120}"
        ) from None
    if isinstance(found, Mapping):  # as several trainers save it
        found = next((found[key] for key in HOLDERS if isinstance(found.get(key), Mapping)), found)
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UsageError(f"{path} holds {kind_of(found)}, not a state dict of tensors (--init)")
    tensors = {str(name): tensor for name, tensor in found.items()}
    for prefix in WRAPPERS:
        if tensors and all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


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
        "also has": [name for name in found if name not in own],
        "has": shapes,
    }
    told = [f"{what} {formatting.first_few(names, 3)}" for what, names in faults.items() if names]
    if told:
        raise UsageError(f"{path} is of another model (--init): it {', and '.join(told)}")
    model.load_state_dict(found)
