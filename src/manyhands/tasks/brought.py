"""Tasks, recipes and schedules that are Python objects: those of a script or a notebook.

No file or name stands for them, so in a spec such an object is `name@fingerprint`. Workers get it over the
authenticated control channel, pickled by value; nothing of it is written to the run's folder, so a run can
only be resumed by a program that has the same object. Large tensors are copied once, into memory without a
name that the workers of this host map (copy on write), and that is gone when the last of them ends.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from manyhands.core.errors import UsageError, kind_of
from manyhands.records.user_names import short_name
from manyhands.tasks.base import Task
from manyhands.tasks.fingerprint import fingerprint

LARGE = 1 << 16  # bytes: larger arrays are shared
Builder = Callable[..., Task]

_known: dict[str, Callable[..., Any]] = {}
_versions: dict[str, int] = {}


def bring(task: Task | Builder) -> str:
    """Make a task known in this process, and return the name that a spec has for it."""
    if not isinstance(task, Task) and not callable(task):
        raise UsageError(
            "a task is a name, FILE.py:NAME, an mh.Task or a function that returns one, not a "
            f"{type(task).__name__}"
        )
    if isinstance(task, Task):
        return _keep(task.name, task, lambda: task)
    return _keep(getattr(task, "__name__", "task"), task, task)


def bring_function(function: Callable[..., Any], what: str) -> str:
    """Make a recipe or a schedule known in this process, and return the name that a spec has for it."""
    if not callable(function):
        raise UsageError(f"a {what} is a name, FILE.py:NAME or a function, not {kind_of(function)}")
    name = getattr(function, "__name__", what)
    return _keep(what if name == "<lambda>" else name, function, function)


def _keep(name: str, value: object, builder: Callable[..., Any]) -> str:
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "task"
    found = f"{plain}@{fingerprint(value)}"
    _known[found] = builder
    _versions[found] = version(found) + 1
    return found


def version(name: str) -> int:
    """How many times a task of this name was brought: an object that is equal may still be another one."""
    return _versions.get(name, 0)


def builder(name: str, what: str = "task") -> Callable[..., Any]:
    """The function behind a name: it builds a task, or is a recipe or a schedule."""
    if name not in _known:
        also = "" if what == "task" else f", {what}={short_name(name)}"
        raise UsageError(
            f"{name} is a {what} of a Python program: continue it there with the same {what}, "
            f"mh.train(task{also}, resume=True, out=FOLDER)"
        )
    return _known[name]


class Packed(NamedTuple):
    """Objects on their way to workers."""

    names: list[str]
    pickled: bytes
    memory: tuple[int, int] | None  # process and descriptor of the shared arrays


class _Array(NamedTuple):
    start: int
    shape: tuple[int, ...]
    dtype: str  # of numpy
    tensor: bool


class _TaskPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions and classes by value, and puts large arrays aside."""

    def __init__(
        self, file: io.BytesIO, aside: Callable[[np.ndarray[Any, Any], bool], _Array] | None
    ) -> None:
        super().__init__(file)
        self._aside = aside

    def persistent_id(self, value: object) -> Any:
        """What stands for a large array."""
        if self._aside is None:
            return None
        if type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided:
            if value.nbytes >= LARGE and not value.requires_grad and value.dtype != torch.bfloat16:
                return tuple(self._aside(value.contiguous().numpy(), True))
        elif type(value) is np.ndarray and value.dtype.kind in "biuf" and value.nbytes >= LARGE:
            return tuple(self._aside(np.ascontiguousarray(value), False))
        return None


@contextmanager
def packed(names: list[str], *, shared: bool) -> Iterator[Packed]:
    """Objects for workers; `shared` if all of them are on this host. Inside, their memory exists."""
    with ExitStack() as stack:
        memory, aside = None, None
        if shared and hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("manyhands task")
            stack.callback(os.close, descriptor)
            memory, aside = (os.getpid(), descriptor), _writer(descriptor)
        file = io.BytesIO()
        try:
            _TaskPickler(file, aside).dump({name: builder(name) for name in names})
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{' or '.join(map(short_name, names))} cannot be sent to workers: {error}; put it into a "
                "file and use FILE.py:NAME, or open what cannot be sent inside the function that needs it"
            ) from error
        yield Packed(names, file.getvalue(), memory)


def unpack(task: Packed) -> None:
    """Make packed objects known in this process."""
    if all(name in _known for name in task.names):
        return
    loader = pickle.Unpickler(io.BytesIO(task.pickled))  # noqa: S301 (from the parent, over a channel with a key)
    if task.memory is not None:
        process, descriptor = task.memory
        with open(f"/proc/{process}/fd/{descriptor}", "rb") as file:  # noqa: PTH123 (not a path of ours)
            size = os.fstat(file.fileno()).st_size
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""
        loader.persistent_load = lambda found: _mapped(memory, _Array(*found))  # type: ignore[method-assign]
    _known.update(loader.load())


def _writer(descriptor: int) -> Callable[[np.ndarray[Any, Any], bool], _Array]:
    def write(array: np.ndarray[Any, Any], tensor: bool) -> _Array:
        start = -(-os.lseek(descriptor, 0, os.SEEK_END) // 64) * 64
        os.ftruncate(descriptor, start)
        os.lseek(descriptor, start, os.SEEK_SET)
        rest = array.reshape(-1).view(np.uint8).data
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        return _Array(start, array.shape, array.dtype.str, tensor)

    return write


def _mapped(memory: Any, found: _Array) -> Any:
    dtype = np.dtype(found.dtype)
    count = int(np.prod(found.shape, dtype=np.int64))
    array = np.frombuffer(memory, dtype, count, found.start).reshape(found.shape)
    return torch.from_numpy(array) if found.tensor else array
