"""Files that are either complete or absent (law 6), and that are regular files: no link, pipe or device.

A file is written under a temporary name and then renamed. Files that are read may come from strangers: a link
could lead to any file of the reader, and a pipe would never end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from manyhands.core.errors import StorageError, UsageError, shown

LONGEST_NAME = 255  # bytes of one name, the limit of nearly every file system
LONGEST_PATH = 3800  # bytes of a path, so that the files of a run still fit below it (the limit is 4,096)
DEEPEST = 200  # levels of folders

# Windows has only the last of these, other systems the first two
_SAFE_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader always finds the old content or the new one, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        temporary.unlink(missing_ok=True)
        # "x": a link that a stranger puts there meanwhile is not followed
        with temporary.open("xb") as file:
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
    """A descriptor of a regular file. OSError with a plain reason if it is a link, a pipe or a folder.

    Folders in its path may be links: those are the user's own.
    """
    try:
        descriptor = os.open(path, flags | _SAFE_FLAGS, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, not a file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def read_regular(path: Path, most: int | None = None) -> bytes:
    """The content of a regular file. OSError as above, or if it is larger than `most` bytes."""
    with open(open_regular(path), "rb") as file:
        if most is not None and os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes")
        return file.read()


def usable(path: Path) -> Path:
    """Refuse a path that no file system accepts: not UTF-8, too long, too deep, or with a NUL."""
    try:
        names = [os.fsencode(name) for name in path.parts]
        str(path).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{shown(str(path))} cannot be a path: it is not text in UTF-8") from None
    reason = ""
    if b"\0" in b"".join(names):
        reason = "it contains a NUL character"
    elif len(names) > DEEPEST:
        reason = f"it has {len(names):,} levels of folders, at most {DEEPEST} are allowed"
    elif len(os.fsencode(path)) > LONGEST_PATH or any(len(name) > LONGEST_NAME for name in names):
        reason = f"a name may have at most {LONGEST_NAME} bytes, a path {LONGEST_PATH:,}"
    if reason:
        raise UsageError(f"{shown(str(path))} cannot be a path: {reason}")
    return path


def remove_partial(folder: Path) -> None:
    """Remove temporary files of processes that were killed while writing."""
    for leftover in folder.glob(".*.partial"):
        if leftover.is_symlink() or not leftover.is_dir():  # a folder is not one of them
            leftover.unlink(missing_ok=True)


def cannot_write(path: Path, error: OSError) -> StorageError:
    """The error for a full or read-only disk."""
    return StorageError(f"cannot write {path}: {(error.strerror or str(error)).lower()}")


def _sync_folder(folder: Path) -> None:
    # Without this, a power cut may lose the rename although the content is on the disk.
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot open folders, and stores names by itself
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
