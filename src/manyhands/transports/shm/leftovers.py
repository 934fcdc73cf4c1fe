"""Files of shared memory that a killed process left behind, and how to tell them from files in use.

A file has a name only from its creation until the last worker has opened it, a few milliseconds. Only workers
that are killed in that moment leave one behind. The name contains its creator,
`manyhands-<pid>-<start time of that process>-<token>-<what>`, because a pid alone may be reused.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import tempfile
from pathlib import Path

from manyhands.core import file_locks

PREFIX = "manyhands"
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-[0-9a-f]+-.+")


def home() -> Path:
    """The folder of shared memory: a file system in memory if there is one."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def new_name(what: str) -> str:
    """A new file name that contains this process."""
    pid = os.getpid()
    return f"{PREFIX}-{pid}-{_start(pid) or 0}-{secrets.token_hex(4)}-{what}"


def sweep() -> list[str]:
    """Remove the files whose creators have ended, and return their names."""
    if sys.platform == "win32":  # no files are created there, and os.kill(pid, 0) would interrupt the process
        return []
    return [path.name for path in sorted(home().glob(f"{PREFIX}-*")) if _orphaned(path) and _remove(path)]


def _orphaned(path: Path) -> bool:
    match = _NAME.fullmatch(path.name)
    if match is None or _alive(int(match[1]), int(match[2])):
        return False
    # A creator in another container looks dead here, but its lock on the file is still held.
    try:
        with path.open("rb") as file:
            return file_locks.take(file.fileno())
    except OSError:  # another user's file, or already removed
        return False


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _alive(pid: int, start: int) -> bool:
    """Whether this process still runs, and not another one with the same pid."""
    now = _start(pid)
    if now is not None:
        return now == start
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return start == 0  # no /proc here: the pid is all there is


def _start(pid: int) -> int | None:
    """When a process started, in the kernel's ticks since boot."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A zombie has ended; its parent has not collected it yet.
    return None if after_name[0] in "ZX" else int(after_name[19])
