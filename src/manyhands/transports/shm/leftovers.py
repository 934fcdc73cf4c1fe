"""Names in shared memory that a killed creator left behind, and how to tell them from those in use.

A file of shared memory has a name only from its creation until the last worker has opened it, some
milliseconds: only a gang that is killed in that moment leaves one behind. The name says who created it,
`manyhands-<pid>-<start of that process>-<token>-<what>`, since a number alone may by now be another's.
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
    """Where shared memory lives: a file system in memory where there is one."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def new_name(what: str) -> str:
    """A name of this process's own."""
    pid = os.getpid()
    return f"{PREFIX}-{pid}-{_start(pid) or 0}-{secrets.token_hex(4)}-{what}"


def sweep() -> list[str]:
    """Remove the names whose creators are no more, and return them."""
    if sys.platform == "win32":  # where nobody creates any, and to ask for a process is to interrupt it
        return []
    return [path.name for path in sorted(home().glob(f"{PREFIX}-*")) if _orphaned(path) and _remove(path)]


def _orphaned(path: Path) -> bool:
    match = _NAME.fullmatch(path.name)
    if match is None or _alive(int(match[1]), int(match[2])):
        return False
    # In another container's process table the creator looks dead; its lock on the file does not.
    try:
        with path.open("rb") as file:
            return file_locks.take(file.fileno())
    except OSError:  # someone else's, or gone by now
        return False


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _alive(pid: int, start: int) -> bool:
    """Whether that very process still runs, and not another one with its number."""
    now = _start(pid)
    if now is not None:
        return now == start
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return start == 0  # no /proc here: the number is all there is


def _start(pid: int) -> int | None:
    """When a process started, in the kernel's ticks since boot."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A zombie has ended: it only waits for its parent to notice.
    return None if after_name[0] in "ZX" else int(after_name[19])
