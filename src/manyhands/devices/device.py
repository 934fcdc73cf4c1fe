"""The device that a rank computes on: whatever is asked of one goes through here, so that tests can fake it.

`Host` is the null member: its work is done when a call returns, and its memory is the process's. `Cuda` was
never run by us: it was checked by reading and by the fake that the tests put in its place.
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

_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may add up in any order


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the work before it is done."""


class Stream(Protocol):
    """Work that a device does in order."""

    def wait_stream(self, other: Any) -> None:
        """What comes next begins after all that the other was given so far."""

    def wait_event(self, event: Any) -> None:
        """What comes next begins after that."""

    def record_event(self) -> Any:
        """The point after all that it was given so far."""

    def synchronize(self) -> None:
        """Wait, here, until all of it is done."""


class Device(Protocol):
    """What a rank asks of its own device; of another one nothing is ever asked."""

    @property
    def where(self) -> torch.device:
        """Where its tensors are."""

    @property
    def asynchronous(self) -> bool:
        """Whether a call may return before its work is done, so that a clock must wait for it."""

    @property
    def memory_of(self) -> Literal["host", "device"]:
        """Whose memory `held` and `most` count."""

    def taken(self) -> AbstractContextManager[None]:
        """Inside it is this process's current device, and computes the same bits each time where it can."""

    def synchronize(self) -> None:
        """Wait until it has done all it was given."""

    def seed(self, number: int) -> None:
        """Set the host's generator and its own."""

    def random_state(self) -> dict[str, Tensor]:
        """Where its own generator stands, by name; the host's is not among them."""

    def restore_random_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Put it back, where these tensors have one: others may have been saved on another kind of device."""

    def held(self) -> int:
        """Bytes that this process holds of its memory."""

    def most(self) -> int:
        """The most bytes it has held."""

    def side(self) -> Stream:
        """A new stream beside the one that computes."""

    def computing(self) -> Stream:
        """The stream that computes."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, work is given to this stream."""

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """This tensor's memory is used again only when the stream is done with it."""

    def pinned(self, nbytes: int) -> Tensor:
        """Bytes of main memory that it can copy to and from while it computes."""


@final
class Host:
    """The processor: nothing to set, nothing to wait for."""

    where = torch.device("cpu")
    asynchronous = False
    memory_of: Literal["host", "device"] = "host"

    def taken(self) -> AbstractContextManager[None]:
        """It always is."""
        return nullcontext()

    def synchronize(self) -> None:
        """A call returns when it is done."""

    def seed(self, number: int) -> None:
        """Not `torch.manual_seed`, which would seed the GPUs of whoever called us."""
        torch.default_generator.manual_seed(number)

    def random_state(self) -> dict[str, Tensor]:
        """None but the host's."""
        return {}

    def restore_random_state(self, tensors: Mapping[str, Tensor]) -> None:
        """None but the host's."""

    def held(self) -> int:
        """Bytes of this process in main memory; where the system does not say, the most there ever were."""
        table = Path("/proc/self/statm")
        if table.exists():
            return int(table.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return peak_memory()

    def most(self) -> int:
        """Bytes of this process in main memory."""
        return peak_memory()

    def side(self) -> Stream:
        """Work is done as it is given."""
        return _Done()

    def computing(self) -> Stream:
        """Work is done as it is given."""
        return _Done()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Work is done as it is given."""
        return nullcontext()

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Nothing is under way."""

    def pinned(self, nbytes: int) -> Tensor:
        """Any memory will do."""
        return torch.empty(nbytes, dtype=torch.uint8)


class _Done:
    """The null stream, and the null event: all is done."""

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> _Done:
        return self

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


@final
class Cuda:
    """One GPU, by its number in this process."""

    asynchronous = True
    memory_of: Literal["host", "device"] = "device"

    def __init__(self, index: int) -> None:
        self.where = torch.device("cuda", index)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Set before anything else touches CUDA, or each rank would open a context on the first GPU as well.

        Peaks of memory are counted from here on.
        """
        name, value = _WORKSPACE
        ours = name not in os.environ
        if ours:  # read when a process first multiplies: who has done so before keeps what it had then
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
        """Wait for this GPU alone."""
        torch.cuda.synchronize(self.where)

    def seed(self, number: int) -> None:
        """This GPU's generator too, which must be the current one."""
        torch.default_generator.manual_seed(number)
        torch.cuda.manual_seed(number)

    def random_state(self) -> dict[str, Tensor]:
        """This GPU's, under a name without its number: the same rank may have another GPU next time."""
        return {"random/cuda": torch.cuda.get_rng_state(self.where)}

    def restore_random_state(self, tensors: Mapping[str, Tensor]) -> None:
        """This GPU's; 0.1.0 saved those of all GPUs, by number."""
        state = tensors.get("random/cuda", tensors.get(f"random/cuda/{self.where.index}"))
        if state is not None:
            torch.cuda.set_rng_state(state, self.where)

    def held(self) -> int:
        """Bytes that torch has reserved on this GPU, used or not."""
        return torch.cuda.memory_reserved(self.where)

    def most(self) -> int:
        """The most bytes that torch had reserved on this GPU since it was taken."""
        return torch.cuda.max_memory_reserved(self.where)

    def side(self) -> Stream:
        """A stream of this GPU."""
        stream: Stream = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]
        return stream

    def computing(self) -> Stream:
        """The current stream of this GPU."""
        return torch.cuda.current_stream(self.where)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Kernels and copies go to this stream."""
        return torch.cuda.stream(stream)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """The allocator would only know of the stream that the tensor was made on."""
        tensor.record_stream(stream)

    def pinned(self, nbytes: int) -> Tensor:
        """Memory that the system does not move."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


HOST = Host()


def count() -> int:
    """How many GPUs this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose(name: str, local_rank: int = 0) -> Device:
    """The device of this name, for the worker of this number on its host; `auto` is CUDA if there is any."""
    if name == "cpu":
        return HOST
    found = count()
    if name == "cuda" and not found:
        raise UsageError("device cuda: this torch sees no CUDA device (known here: cpu)")
    return Cuda(local_rank % found) if found else HOST


def of(where: torch.device) -> Device:
    """The device that has tensors there."""
    return Cuda(where.index or 0) if where.type == "cuda" else HOST


@contextmanager
def _repeatable() -> Iterator[None]:
    """Law 6 on a GPU: kernels that give the same bits each time; where there is none, torch warns."""
    cudnn = torch.backends.cudnn
    rules: Any = torch.utils.deterministic
    before = cudnn.deterministic, cudnn.benchmark
    filled, strict = rules.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    cudnn.deterministic, cudnn.benchmark = True, False
    rules.fill_uninitialized_memory = False  # it finds bugs, and costs a pass over all new memory
    if not strict:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
        rules.fill_uninitialized_memory = filled
        if not strict:
            torch.use_deterministic_algorithms(False)
