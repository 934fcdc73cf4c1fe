"""Find and build a task by its name, or by a user's `path/to/file.py:name`."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from manyhands.core import registry
from manyhands.core.errors import ManyhandsError, UsageError, choices, kind_of, shown
from manyhands.data import generators
from manyhands.records.user_names import file_of, is_brought
from manyhands.tasks import TASKS, brought
from manyhands.tasks.base import Task
from manyhands.tasks.examine import Examination, examine


def builder(name: str) -> Callable[..., Task]:
    """The function that builds a task from its options."""
    if is_brought(name):
        return brought.builder(name)
    if ".py" not in name:
        found: Callable[..., Task] = registry.member("task", TASKS, name)
        return found
    value, offered = _in_file(name, "task", _offers)
    attribute = name.rpartition(":")[2]
    if isinstance(value, Task):
        return lambda: value
    if not callable(value):
        raise UsageError(
            f"{name} is {kind_of(value)}, not a task or a function that returns one "
            f"({choices(attribute, offered)})"
        )
    if needed := _required(value):
        raise UsageError(f"{name} needs {' and '.join(needed)}: give every parameter of a task a default")
    made: Callable[..., Task] = value
    return made


def function(name: str, what: str) -> Callable[..., Any]:
    """A function of the user's that is not a task: `FILE.py:NAME`, or an object of a Python program."""
    if is_brought(name):
        return brought.builder(name, what)
    value, offered = _in_file(name, what, _is_own_function)
    if not callable(value):
        raise UsageError(
            f"{name} is {kind_of(value)}, not a function ({choices(name.rpartition(':')[2], offered)})"
        )
    found: Callable[..., Any] = value
    return found


def _in_file(name: str, what: str, offers: Callable[[ModuleType, str, Any], bool]) -> tuple[Any, list[str]]:
    """What `FILE.py:NAME` stands for, and the names of this kind that the file offers."""
    path, _, attribute = name.rpartition(":") if ".py:" in name else (name, "", "")
    module = _import(file_of(name) or Path(path), _changed(name))
    offered = [key for key, value in vars(module).items() if offers(module, key, value)]
    if not attribute:
        raise UsageError(f"{name} is a file: name a {what} in it, as {name}:NAME ({choices('', offered)})")
    if attribute not in vars(module):
        raise UsageError(f"{path} has no {what} {shown(attribute)} ({choices(attribute, offered)})")
    return getattr(module, attribute), offered


def build(name: str, options: Mapping[str, Any]) -> Task:
    """Build a task. The last one is cached, so that a second run in the same process starts at once."""
    return _build(name, json.dumps(dict(options), sort_keys=True), _changed(name))


def examined(name: str, options: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Examination:
    """Examine a user's task; the last one is cached. Our own tasks are examined by tests."""
    if name in TASKS:
        return Examination((), needs_two=False)
    return _examined(name, json.dumps(dict(options), sort_keys=True), _changed(name), device, dtype)


@lru_cache(maxsize=1)
def _examined(name: str, options: str, changed: int, device: torch.device, dtype: torch.dtype) -> Examination:
    with no_exit(name, UsageError):
        return examine(build(name, json.loads(options)), device, dtype)


@lru_cache(maxsize=1)
def _build(name: str, options: str, changed: int) -> Task:
    make = builder(name)
    given = registry.parse(name, make, json.loads(options))
    with no_exit(name, UsageError), _seeded():
        task: Any = make(**given)
    if not isinstance(task, Task):
        raise UsageError(f"{name} returned {kind_of(task)}, not a manyhands Task")
    return task


@contextmanager
def _seeded() -> Iterator[None]:
    """Let a task that draws random numbers draw the same ones in every process: all have the same data."""
    with generators.kept():
        generators.seed(0)
        yield


@contextmanager
def no_exit(who: str, error: type[ManyhandsError] = ManyhandsError) -> Iterator[None]:
    """Turn sys.exit in a task's own code into an error. Otherwise the process would end silently."""
    try:
        yield
    except SystemExit as exit_:
        frames = traceback.extract_tb(exit_.__traceback__)
        where = f" (line {frames[-1].lineno} of {Path(frames[-1].filename).name})" if frames else ""
        code = "" if exit_.code is None else repr(exit_.code)
        raise error(
            f"{who} ended the process with sys.exit({code}){where}: raise an exception there instead"
        ) from exit_


def _changed(name: str) -> int:
    """When the file of a task was modified: an edited file is imported again. An object has a version."""
    if is_brought(name):
        return brought.version(name)
    path = file_of(name)
    return path.stat().st_mtime_ns if path is not None and path.is_file() else 0


@lru_cache(maxsize=4)  # of a task, a recipe and a schedule
def _import(path: Path, changed: int) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    name = "manyhands_task_" + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # so that its classes can be pickled
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as for a script: it may import what lies next to it
    try:
        with no_exit(str(path), UsageError), _seeded():
            specification.loader.exec_module(module)
    except UsageError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _offers(module: ModuleType, name: str, value: Any) -> bool:
    """Whether it is a Task, a function of this file annotated to return one, or a public one that may."""
    if isinstance(value, Task):
        return True
    if not callable(value) or getattr(value, "__module__", None) != module.__name__:
        return False
    annotations = getattr(value, "__annotations__", {})
    if "return" in annotations:
        return annotations["return"] in (Task, "Task", "mh.Task", "manyhands.Task")
    return not (name.startswith("_") or isinstance(value, type) or _required(value))


def _is_own_function(module: ModuleType, name: str, value: Any) -> bool:
    mine = getattr(value, "__module__", None) == module.__name__
    return callable(value) and mine and not name.startswith("_") and not isinstance(value, type)


def _required(function: Callable[..., Any]) -> list[str]:
    """The parameters that have no default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in several]
