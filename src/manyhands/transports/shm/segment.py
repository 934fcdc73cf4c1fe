"""Memory that the processes of one host share: a file without a name that each of them maps."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from manyhands.core.errors import ManyhandsError
from manyhands.transports.shm import leftovers

Exchange = Callable[[str], list[str]]  # a text to all processes, and the texts of all; the creator's is first


def create_together(
    exchange: Exchange,
    creator: bool,
    what: str,
    nbytes: int,
    *,
    reserved: int | None = None,
    opened: Callable[[int], None] = lambda fd: None,
) -> tuple[int, mmap.mmap]:
    """One file for all processes, opened and mapped. All must call it, and if one fails, all fail.

    When it returns in one process, all processes have called `opened`. The creator removes the name as soon
    as every process has opened the file, so that nothing is left behind, however they end.
    """
    path = leftovers.home() / leftovers.new_name(what)
    # MAP_POPULATE avoids page faults later, but would also allocate what is not reserved.
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if reserved is None else 0)
    fd = -1

    def create() -> None:
        nonlocal fd
        if creator:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)  # tells `leftovers.sweep` that the file is in use
            os.ftruncate(fd, nbytes)
            reserve(fd, 0, nbytes if reserved is None else reserved)

    def open_() -> None:
        nonlocal fd
        if not creator:
            fd = _open(Path(paths[0]))
        opened(fd)

    try:
        paths = _each(exchange, create, str(path))
        _each(exchange, open_)
        return fd, mmap.mmap(fd, nbytes, flags)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    finally:
        if creator:
            path.unlink(missing_ok=True)


def attach(path: str) -> tuple[int, mmap.mmap]:
    """Map a file that another process of this host holds open and that has no name any more."""
    fd = _open(Path(path))
    return fd, mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED)


def reserve(fd: int, start: int, nbytes: int) -> None:
    """Allocate this part of a file now, or raise an error that says how much memory is free.

    Without it, memory is allocated at the first write, and SIGBUS kills the writer if none is left.
    """
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    try:
        os.posix_fallocate(fd, start, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
            raise
        home = leftovers.home()
        free = shutil.disk_usage(home).free
        raise ManyhandsError(
            f"shared memory: {nbytes / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free in {home} "
            "(in a container: docker run --shm-size=8g)"
        ) from error


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ManyhandsError(
            f"shared memory {path} cannot be opened ({error.strerror}): the workers of a host must see "
            f"the same {path.parent} (containers: --ipc=host, or transport torch)"
        ) from error


def _each(exchange: Exchange, action: Callable[[], None], text: str = "") -> list[str]:
    """Do an action in every process and exchange texts. If one fails, all fail with its reason."""
    try:
        action()
    except (ManyhandsError, OSError) as error:
        exchange(f"!{error}")
        raise ManyhandsError(f"{error}") from error
    texts = exchange(text)
    for answer in texts:
        if answer.startswith("!"):
            raise ManyhandsError(answer[1:])
    return texts
