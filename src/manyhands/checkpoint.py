"""Checkpoints: one safetensors file each, whole tensors by name, written atomically, executing nothing."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from manyhands.device import HOST, Device
from manyhands.errors import CheckpointError
from manyhands.files import remove_partial, write_atomically
from manyhands.spec import same_id

FORMAT = "manyhands-checkpoint-1"
_NAME = re.compile(r"step-(\d{9,})\.safetensors")


class Checkpoint(NamedTuple):
    """A moment of a run: its tensors by name, and the plain numbers beside them."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run, the last few of them kept."""

    folder: Path
    run: str  # the id of the spec they belong to
    keep: int = 3

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Write a checkpoint; older ones go only once it is whole on the disk."""
        path = self.folder / f"step-{step:09d}.safetensors"
        whole, text = separate(tensors), json.dumps(state)
        metadata = {"format": FORMAT, "run": self.run, "state": text, "crc32": _checksum(whole, text)}
        write_atomically(path, safetensors.torch.save(whole, metadata))
        for old in self.paths()[: -self.keep]:
            old.unlink(missing_ok=True)
        return path

    def paths(self) -> list[Path]:
        """The files here that are called like checkpoints, oldest first."""
        found = [path for path in self.folder.glob("*.safetensors") if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.stem.removeprefix("step-")))

    def latest(self, say: Callable[[str], None], accept: frozenset[str] = frozenset()) -> Checkpoint | None:
        """The newest good checkpoint, or None where there is none at all.

        A damaged or foreign one is passed over with a sentence. `accept` names other runs whose
        checkpoints are welcome: the spec was changed on purpose.
        """
        remove_partial(self.folder)
        paths = self.paths()
        for path in reversed(paths):
            try:
                return load(path, accept | {self.run})
            except CheckpointError as error:
                say(f"{error}; trying the one before it")
        if paths:
            raise CheckpointError(
                f"none of the {len(paths)} checkpoints in {self.folder} can be used; "
                "remove them to start this run from the beginning"
            )
        return None


def load(path: Path, runs: frozenset[str]) -> Checkpoint:
    """Read a checkpoint of one of these runs, checked to the last byte."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CheckpointError(f"{path} is not a checkpoint of manyhands")
            if not any(same_id(metadata.get("run", ""), run) for run in runs):
                raise CheckpointError(f"{path} belongs to another run ({metadata.get('run')})")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged ({str(error).lower()})") from None
    text = metadata.get("state", "")
    if _checksum(tensors, text) != metadata.get("crc32"):
        raise CheckpointError(f"{path} is damaged (its checksum does not match)")
    return Checkpoint(tensors, json.loads(text))


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors wants them: contiguous, on the host, none sharing memory (as tied ones do)."""
    whole: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        part = tensor.detach().cpu().contiguous()
        address = part.untyped_storage().data_ptr()
        if address in seen:
            part = part.clone()
        seen.add(address)
        whole[name] = part
    return whole


def random_state(device: Device = HOST) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every generator a task may draw from: torch's (dropout), the device's own, numpy's and Python's."""
    tensors = {"random/torch": torch.get_rng_state(), **device.random_state()}
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    numpy_state = [kind, np.asarray(keys).tolist(), position, has_gauss, gauss]
    return tensors, {"numpy": numpy_state, "python": random.getstate()}


def restore_random_state(
    tensors: Mapping[str, Tensor], state: Mapping[str, Any], device: Device = HOST
) -> None:
    """Put every generator back to where `random_state` found it."""
    torch.set_rng_state(tensors["random/torch"])
    device.restore_random_state(tensors)
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    python_version, words, gauss_next = state["python"]
    random.setstate((python_version, tuple(words), gauss_next))


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    value = zlib.crc32(text.encode())
    for name in sorted(tensors):
        value = zlib.crc32(name.encode(), value)
        row = tensors[name].reshape(-1)
        if row.numel() == 1:  # its stride may be anything, and torch calls it contiguous
            row = row.as_strided((1,), (1,))
        value = zlib.crc32(row.view(torch.uint8).numpy().data, value)
    return f"{value:08x}"
