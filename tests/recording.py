"""A fake GPU whose tensors are on the host: it writes down what it is asked, and by which number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from manyhands.core.rank_info import RankInfo
from manyhands.devices import device
from manyhands.devices.device import HOST
from manyhands.engine.job import Job
from manyhands.engine.session import work

HELD, MOST = 70_000_000, 123_456_789  # bytes
calls: list[tuple[int, str]] = []  # the GPU's number, and what it was asked


class Recording:
    """One fake GPU. Its generator is a number that `seed` sets."""

    where = torch.device("cpu")
    asynchronous = True
    memory_of: Literal["host", "device"] = "device"

    def __init__(self, index: int) -> None:
        self.index = index

    def _note(self, what: str) -> None:
        calls.append((self.index, what))

    @contextmanager
    def taken(self) -> Iterator[None]:
        self._note("taken")
        yield
        self._note("left")

    def synchronize(self) -> None:
        self._note("synchronize")

    def seed(self, number: int) -> None:
        self._note("seed")
        torch.default_generator.manual_seed(number)

    def random_state(self) -> dict[str, Tensor]:
        self._note("random_state")
        return {"random/cuda": torch.full((16,), 40 + self.index, dtype=torch.uint8)}

    def restore_random_state(self, tensors: Mapping[str, Tensor]) -> None:
        found = tensors.get("random/cuda")
        self._note(f"restore {'nothing' if found is None else found[:1].tolist()}")

    def held(self) -> int:
        self._note("held")
        return HELD

    def most(self) -> int:
        self._note("most")
        return MOST

    def side(self) -> Any:
        return Ordered(self, "side")

    def computing(self) -> Any:
        return Ordered(self, "computing")

    def on(self, stream: Any) -> Any:
        self._note(f"on {stream.name}")
        return nullcontext()

    def keep(self, tensor: Tensor, stream: Any) -> None:
        self._note(f"keep for {stream.name}")

    def pinned(self, nbytes: int) -> Tensor:
        self._note("pinned")
        return HOST.pinned(nbytes)


class Ordered:
    """A stream of a fake GPU, or a point in one."""

    def __init__(self, device: Recording, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: Ordered) -> None:
        self.device._note(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Ordered) -> None:
        self.device._note(f"{self.name} waits for {event.name}")

    def record_event(self) -> Ordered:
        return Ordered(self.device, f"event of {self.name}")

    def synchronize(self) -> None:
        self.device._note(f"synchronize {self.name}")

    def query(self) -> bool:
        return True


def install(patch: pytest.MonkeyPatch, gpus: int = 2) -> list[tuple[int, str]]:
    """Put so many fake GPUs in the place of CUDA's; what they are asked is appended to this list."""
    calls.clear()
    patch.setattr(device, "count", lambda: gpus)
    patch.setattr(device, "Cuda", Recording)
    return calls


def fake_work(info: RankInfo, job: Job) -> tuple[Any, list[tuple[int, str]]]:
    """Be one rank with fake GPUs, in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        asked = install(patch)
        return work(info, job), list(asked)
