"""From a task's name, or a user's `path/to/file.py:name`, to its builder and to the task itself."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from manyhands import axes
from manyhands.errors import UsageError, choices
from manyhands.spec import file_of
from manyhands.tasks import TASKS
from manyhands.tasks.base import Task


def builder(name: str) -> Callable[..., Task]:
    """The function that makes a task from its options."""
    if ".py" not in name:
        found: Callable[..., Task] = axes.member("task", TASKS, name)
        return found
    path, _, attribute = name.rpartition(":") if ".py:" in name else (name, "", "")
    module = _import(file_of(name) or Path(path), _changed(name))
    offered = [key for key, value in vars(module).items() if _makes_a_task(module, value)]
    if not attribute:
        raise UsageError(f"{name} is a file: say which task in it, as {name}:NAME ({choices('', offered)})")
    if attribute not in offered:
        raise UsageError(f"{path} has no task {attribute!r} ({choices(attribute, offered)})")
    value = getattr(module, attribute)
    return (lambda: value) if isinstance(value, Task) else value


def build(name: str, options: Mapping[str, Any]) -> Task:
    """Make a task; the last one made is kept, so that a second run of it in one process starts at once."""
    return _build(name, json.dumps(dict(options), sort_keys=True), _changed(name))


@lru_cache(maxsize=1)
def _build(name: str, options: str, changed: int) -> Task:
    make = builder(name)
    task = make(**axes.parse(name, make, json.loads(options)))
    if not isinstance(task, Task):
        raise UsageError(f"{name} made a {type(task).__name__}, not a manyhands Task")
    return task


def _changed(name: str) -> int:
    """When a task's file was last written: an edited one is imported again (0 where there is no file)."""
    path = file_of(name)
    return path.stat().st_mtime_ns if path is not None and path.is_file() else 0


@lru_cache(maxsize=1)
def _import(path: Path, changed: int) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    name = "manyhands_task_" + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # so that its classes can be pickled
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _makes_a_task(module: ModuleType, value: Any) -> bool:
    """A Task, or a function of this file that says it returns one."""
    if isinstance(value, Task):
        return True
    if not callable(value) or getattr(value, "__module__", None) != module.__name__:
        return False
    return getattr(value, "__annotations__", {}).get("return") in (Task, "Task", "mh.Task", "manyhands.Task")
