"""Files that are either whole or not there (law 6), and that are files: no link, pipe or device.

They are written beside their place, then moved into it. What is read may come from a stranger: a link could
lead to any file of whoever opens it, and a pipe would never end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from manyhands.errors import StorageError


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash at any moment, finds the old content or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise cannot_write(path, error) from error


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file; OSError with a plain reason where it is a link, a pipe or a folder.

    The folders on the way to it may be links: those are the user's own.
    """
    try:
        descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, not a file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def read_regular(path: Path) -> bytes:
    """The whole content of a regular file; OSError as above."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def remove_partial(folder: Path) -> None:
    """Remove what a process that was killed in the middle of writing left behind."""
    for leftover in folder.glob(".*.partial"):
        if leftover.is_symlink() or not leftover.is_dir():  # a folder is nobody's half-written file
            leftover.unlink(missing_ok=True)


def cannot_write(path: Path, error: OSError) -> StorageError:
    """The sentence for a full or read-only disk."""
    return StorageError(f"cannot write {path}: {(error.strerror or str(error)).lower()}")


def _sync_folder(folder: Path) -> None:
    # Without this a power cut may forget the rename although the content is on the disk.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
