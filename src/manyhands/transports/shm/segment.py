"""Memory that the processes of one host see alike: a file without a name, mapped by each of them."""

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

Tell = Callable[[str], list[str]]  # one's own text to all, all texts back: the creator's is the first


def together(
    tell: Tell,
    creator: bool,
    what: str,
    nbytes: int,
    *,
    reserved: int | None = None,
    opened: Callable[[int], None] = lambda fd: None,
) -> tuple[int, mmap.mmap]:
    """One file for all of them, opened and mapped; all must come here, and all fail if one does.

    When this returns to one of them, all have been through `opened`. The creator takes the name away as
    soon as everyone has the file: nothing is left behind, however they end.
    """
    path = leftovers.home() / leftovers.new_name(what)
    # Mapping at once spares the page faults later, but it would also take what is not reserved.
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if reserved is None else 0)
    fd = -1

    def create() -> None:
        nonlocal fd
        if creator:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)  # says `in use` to a sweep
            os.ftruncate(fd, nbytes)
            reserve(fd, 0, nbytes if reserved is None else reserved)

    def open_() -> None:
        nonlocal fd
        if not creator:
            fd = _open(Path(paths[0]))
        opened(fd)

    try:
        paths = _each(tell, create, str(path))
        _each(tell, open_)
        return fd, mmap.mmap(fd, nbytes, flags)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    finally:
        if creator:
            path.unlink(missing_ok=True)


def attach(path: str) -> tuple[int, mmap.mmap]:
    """The memory that another process of this host holds open: it has lost its name."""
    fd = _open(Path(path))
    return fd, mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED)


def reserve(fd: int, start: int, nbytes: int) -> None:
    """Take this part of a file's memory now, or say how much there is.

    Memory that is taken only when it is written to kills the writer with SIGBUS where there is none left.
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


def _each(tell: Tell, action: Callable[[], None], text: str = "") -> list[str]:
    """Do one's part and tell all others; whoever fails lets all of them fail, with its reason."""
    try:
        action()
    except (ManyhandsError, OSError) as error:
        tell(f"!{error}")
        raise ManyhandsError(f"{error}") from error
    texts = tell(text)
    for told in texts:
        if told.startswith("!"):
            raise ManyhandsError(told[1:])
    return texts
