"""Names of what a user brings: `FILE.py:NAME`, or `name@fingerprint` for an object of a Python program."""

from __future__ import annotations

from pathlib import Path


def is_brought(task: str) -> bool:
    """Whether this stands for a Python object, as `name@fingerprint` (tasks/brought.py)."""
    return "@" in task and ".py" not in task


def is_users(name: str) -> bool:
    """Whether this stands for something of the user's: `FILE.py:NAME`, or an object."""
    return ".py" in name or is_brought(name)


def short_name(name: str) -> str:
    """The name without file or fingerprint: `mine` of `folder/file.py:mine` and of `mine@0b1c2d3e4f5a`."""
    return name.rpartition(":")[2].partition("@")[0]


def file_of(task: str) -> Path | None:
    """The file of `path/to/file.py:name`; None for the name of a built-in task."""
    if ".py" not in task:
        return None
    path = Path(task.rpartition(":")[0] if ".py:" in task else task)
    try:
        return path.expanduser()
    except RuntimeError:  # ~nobody
        return path
