"""Checkpoint files: safetensors with consolidated tensors by name, written atomically, executing nothing."""

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

from manyhands.core import environment
from manyhands.core.atomic_files import cannot_write, read_regular, remove_partial, write_atomically
from manyhands.core.errors import CheckpointError
from manyhands.devices.device import HOST, Device
from manyhands.records import renames
from manyhands.records.spec import same_id

FORMAT = "manyhands-checkpoint-1"
_NAME = re.compile(r"step-([0-9]{9,})\.safetensors")


class Checkpoint(NamedTuple):
    """The state of a run: its tensors by name, and plain data beside them."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]

    @property
    def checksum(self) -> str:
        """A checksum of the content."""
        return _checksum(self.tensors, json.dumps(self.state))


class MismatchError(CheckpointError):
    """A checkpoint that is intact, but does not fit this model or this run."""


def unchecked(saved: Checkpoint) -> Checkpoint:
    """The null check: accept every checkpoint."""
    return saved


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run; the last `keep` are kept."""

    folder: Path
    run: str  # the id of the spec they belong to
    keep: int = 3

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Write a checkpoint; older ones are deleted once it is complete on the disk."""
        path = self.folder / f"step-{step:09d}.safetensors"
        contiguous, text = separate(tensors), json.dumps(state)
        metadata = {"format": FORMAT, "run": self.run, "state": text, "crc32": _checksum(contiguous, text)}
        try:
            self.folder.mkdir(exist_ok=True)  # a user may have removed it
        except OSError as error:
            raise cannot_write(path, error) from error
        write_atomically(path, safetensors.torch.save(contiguous, metadata))
        for old in self.paths()[: -self.keep]:
            old.unlink(missing_ok=True)
        return path

    def paths(self) -> list[Path]:
        """The files with names of checkpoints, oldest first; no folder, link or pipe."""
        return [path for path in self._named_paths() if path.is_file() and not path.is_symlink()]

    def latest(
        self,
        say: Callable[[str], None],
        accept: frozenset[str] = frozenset(),
        check: Callable[[Checkpoint], Checkpoint] = unchecked,
    ) -> Checkpoint | None:
        """The newest good checkpoint, as `check` returns it, or None if there is no checkpoint.

        One that is damaged, of another run, or refused by `check` is skipped with a notice. `accept` has the
        ids of other runs whose checkpoints are accepted: the spec was changed on purpose.
        """
        remove_partial(self.folder)
        paths = self._named_paths()
        failed: list[CheckpointError] = []
        for path in reversed(paths):
            try:
                saved = load(path, accept | {self.run})
                try:
                    return check(saved)
                except MismatchError as error:
                    say(f"{path}: {error}; trying the one before it")
                    failed.append(error)
            except CheckpointError as error:
                say(f"{error}; trying the one before it")
                failed.append(error)
        if failed:
            raise CheckpointError(self._none_of(failed, changed=bool(accept)))
        return None

    def _named_paths(self) -> list[Path]:
        """Everything with the name of a checkpoint, oldest first."""
        found = [path for path in self.folder.glob("*.safetensors") if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.stem.removeprefix("step-")))

    def _none_of(self, failed: list[CheckpointError], *, changed: bool) -> str:
        """Why no checkpoint can be used, by the newest one, and what to do."""
        advice = "remove them to start this run from the beginning"
        if changed and all(isinstance(error, MismatchError) for error in failed):
            advice = "continue without the changed settings"
        return f"{failed[0]}; none of the {len(failed)} checkpoints in {self.folder} can be used: {advice}"


def load(path: Path, runs: frozenset[str]) -> Checkpoint:
    """Read a checkpoint of one of these runs, and check its checksum."""
    try:
        content = read_regular(path, environment.memory() or None)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({_reason(error)})") from None
    except MemoryError:
        raise CheckpointError(f"{path} cannot be read (it does not fit into memory)") from None
    try:
        tensors = safetensors.torch.load(content)
        metadata = _metadata(content)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is damaged ({str(error).lower()})") from None
    except (
        KeyError,
        TypeError,
        ValueError,
        AssertionError,
        RecursionError,
    ):  # such as a type that torch does not have
        raise CheckpointError(f"{path} is damaged (its header cannot be read)") from None
    del content
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of manyhands")
    if not any(same_id(metadata.get("run", ""), run) for run in runs):
        raise CheckpointError(f"{path} belongs to another run ({_short(metadata.get('run'))})")
    text = metadata.get("state", "")
    if _checksum(tensors, text) != metadata.get("crc32"):
        raise CheckpointError(f"{path} is damaged (its checksum does not match)")
    try:
        state = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is damaged (its position is not JSON)") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged (its position is not a JSON object)")
    renames.update("checkpoint", state)
    return Checkpoint(tensors, state)


def _metadata(content: bytes) -> dict[str, str]:
    """The metadata of a safetensors file, which the library only returns for a path."""
    length = int.from_bytes(content[:8], "little")
    found: dict[str, str] = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
    return found


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _short(text: str | None) -> str:
    shown = ascii(text)[1:-1] if text else "none"
    return shown if len(shown) <= 40 else f"{shown[:40]}..."


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors wants them: contiguous, on the host, none sharing memory (as tied ones do)."""
    found: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        part = tensor.detach().cpu().contiguous()
        address = part.untyped_storage().data_ptr()
        if address in addresses:
            part = part.clone()
        addresses.add(address)
        found[name] = part
    return found


def random_state(device: Device = HOST) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The states of all generators that a task may use: torch's, the device's, numpy's and Python's."""
    tensors = {"random/torch": torch.get_rng_state(), **device.random_state()}
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    numpy_state = [kind, np.asarray(keys).tolist(), position, has_gauss, gauss]
    return tensors, {"numpy": numpy_state, "python": random.getstate()}


def restore_random_state(
    tensors: Mapping[str, Tensor], state: Mapping[str, Any], device: Device = HOST
) -> None:
    """Restore the generators from what `random_state` returned."""
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
        if row.numel() == 1:  # its stride may be anything, and torch still calls it contiguous
            row = row.as_strided((1,), (1,))
        value = zlib.crc32(row.view(torch.uint8).numpy().data, value)
    return f"{value:08x}"
