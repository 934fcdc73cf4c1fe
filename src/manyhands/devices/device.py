"""The device that a rank computes on: the CPU or one GPU. Tests replace it with a fake.

`Host` is the null member: its work is done when a call returns, and its memory is the memory of the process.
We never ran `Cuda`: it was checked by reading, and with a fake device in the tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol, final

import torch
from torch import Tensor

from manyhands.core.environment import peak_memory
from manyhands.core.errors import UsageError

_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may sum in any order


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Whether the work before it is done."""


class Stream(Protocol):
    """A queue of work that a device does in order."""

    def wait_stream(self, other: Any) -> None:
        """Let later work wait for all work that the other stream has now."""

    def wait_event(self, event: Any) -> None:
        """Let later work wait for this event."""

    def record_event(self) -> Any:
        """An event after all work that the stream has now."""

    def synchronize(self) -> None:
        """Block the host until all work is done."""


class Device(Protocol):
    """What a rank uses of its own device. It never uses another one."""

    @property
    def where(self) -> torch.device:
        """The torch device of its tensors."""

    @property
    def asynchronous(self) -> bool:
        """Whether a call may return before its work is done, so that a clock must synchronize."""

    @property
    def memory_of(self) -> Literal["host", "device"]:
        """Which memory `held` and `most` count."""

    def taken(self) -> AbstractContextManager[None]:
        """While entered, it is the current device of this process, with deterministic kernels if possible."""

    def synchronize(self) -> None:
        """Wait until all its work is done."""

    def seed(self, number: int) -> None:
        """Seed the random generators of the host and of the device."""

    def random_state(self) -> dict[str, Tensor]:
        """The state of its own random generator, by name. That of the host is not included."""

    def restore_random_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore its random generator, if its state is among these tensors."""

    def held(self) -> int:
        """Bytes of its memory that this process uses."""

    def most(self) -> int:
        """The peak of these bytes."""

    def side(self) -> Stream:
        """A new stream beside the computing one."""

    def computing(self) -> Stream:
        """The computing stream."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """While entered, work goes to this stream."""

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Do not reuse the memory of this tensor before the stream is done with it."""

    def pinned(self, nbytes: int) -> Tensor:
        """Pinned main memory: the device can copy to and from it while it computes."""


@final
class Host:
    """The CPU: nothing to select, nothing to wait for."""

    where = torch.device("cpu")
    asynchronous = False
    memory_of: Literal["host", "device"] = "host"

    def taken(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self) -> None:
        """Return at once: a call returns when its work is done."""

    def seed(self, number: int) -> None:
        """Seed the CPU only. `torch.manual_seed` would also seed the GPUs of the calling program."""
        torch.default_generator.manual_seed(number)

    def random_state(self) -> dict[str, Tensor]:
        return {}

    def restore_random_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing: the caller restores the generator of the host."""

    def held(self) -> int:
        """Bytes of this process in main memory, or their peak if the system does not say."""
        table = Path("/proc/self/statm")
        if table.exists():
            return int(table.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return peak_memory()

    def most(self) -> int:
        return peak_memory()

    def side(self) -> Stream:
        return _Done()

    def computing(self) -> Stream:
        return _Done()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Do nothing: no work is in flight."""

    def pinned(self, nbytes: int) -> Tensor:
        """Ordinary memory."""
        return torch.empty(nbytes, dtype=torch.uint8)


class _Done:
    """The null stream and null event: all work is done."""

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> _Done:
        return self

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


@final
class Cuda:
    """One GPU, by its index in this process."""

    asynchronous = True
    memory_of: Literal["host", "device"] = "device"

    def __init__(self, index: int) -> None:
        self.where = torch.device("cuda", index)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Enter before anything else uses CUDA. Otherwise each rank would also open a context on GPU 0.

        Peaks of memory are counted from here on.
        """
        name, value = _WORKSPACE
        ours = name not in os.environ
        if ours:  # read at the first matrix product of a process; later changes have no effect
            os.environ[name] = value
        before = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        torch.cuda.set_device(self.where)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats(self.where)
        try:
            with _repeatable():
                yield
        finally:
            if before is not None:
                torch.cuda.set_device(before)
            if ours:
                del os.environ[name]

    def synchronize(self) -> None:
        """Wait for this GPU only."""
        torch.cuda.synchronize(self.where)

    def seed(self, number: int) -> None:
        """Seed the CPU and this GPU, which must be the current one."""
        torch.default_generator.manual_seed(number)
        torch.cuda.manual_seed(number)

    def random_state(self) -> dict[str, Tensor]:
        """That of this GPU, under a name without its index: the rank may have another GPU next time."""
        return {"random/cuda": torch.cuda.get_rng_state(self.where)}

    def restore_random_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore this GPU. Version 0.1.0 saved the states of all GPUs by index."""
        state = tensors.get("random/cuda", tensors.get(f"random/cuda/{self.where.index}"))
        if state is not None:
            torch.cuda.set_rng_state(state, self.where)

    def held(self) -> int:
        """Bytes that torch has reserved on this GPU, in use or not."""
        return torch.cuda.memory_reserved(self.where)

    def most(self) -> int:
        """The peak of the bytes that torch had reserved on this GPU."""
        return torch.cuda.max_memory_reserved(self.where)

    def side(self) -> Stream:
        stream: Stream = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]
        return stream

    def computing(self) -> Stream:
        return torch.cuda.current_stream(self.where)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Tell the allocator, which only knows the stream that the tensor was created on."""
        tensor.record_stream(stream)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


HOST = Host()


def count() -> int:
    """The number of GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose(name: str, local_rank: int = 0) -> Device:
    """The device of this name for the worker with this local rank. `auto` is CUDA if there is a GPU."""
    if name == "cpu":
        return HOST
    found = count()
    if name == "cuda" and not found:
        raise UsageError("device cuda: this torch sees no CUDA device (known here: cpu)")
    return Cuda(local_rank % found) if found else HOST


def of(where: torch.device) -> Device:
    """The device of tensors on this torch device."""
    return Cuda(where.index or 0) if where.type == "cuda" else HOST


@contextmanager
def _repeatable() -> Iterator[None]:
    """Deterministic kernels (law 6). torch warns about operations that have none."""
    cudnn = torch.backends.cudnn
    rules: Any = torch.utils.deterministic
    before = cudnn.deterministic, cudnn.benchmark
    filled, strict = rules.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    cudnn.deterministic, cudnn.benchmark = True, False
    rules.fill_uninitialized_memory = False  # filling finds bugs, but costs a pass over all new memory
    if not strict:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
        rules.fill_uninitialized_memory = filled
        if not strict:
            torch.use_deterministic_algorithms(False)
