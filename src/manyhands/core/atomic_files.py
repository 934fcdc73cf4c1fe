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

from manyhands.core.errors import StorageError, UsageError, shown

LONGEST_NAME = 255  # bytes of one name, the limit of nearly every file system
LONGEST_PATH = 3800  # bytes of a path, so that the files of a run still fit below it (the limit is 4,096)
DEEPEST = 200  # folders in each other

# of these Windows has the last only, and the others have the first two
_AS_IT_IS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash at any moment, finds the old content or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        temporary.unlink(missing_ok=True)
        # nothing may lie there by now: a link that a stranger has put in its place is not followed
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
    """A descriptor of a regular file; OSError with a plain reason where it is a link, a pipe or a folder.

    The folders on the way to it may be links: those are the user's own.
    """
    try:
        descriptor = os.open(path, flags | _AS_IT_IS, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, not a file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def read_regular(path: Path, most: int | None = None) -> bytes:
    """The whole content of a regular file; OSError as above, or where it is larger than so many bytes."""
    with open(open_regular(path), "rb") as file:
        if most is not None and os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes")
        return file.read()


def usable(path: Path) -> Path:
    """A path that folders and files can be made at, as far as that can be told from the path itself."""
    try:
        names = [os.fsencode(name) for name in path.parts]
        str(path).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{shown(str(path))} cannot be a path: it is not text in UTF-8") from None
    reason = ""
    if b"\0" in b"".join(names):
        reason = "there is a NUL character in it"
    elif len(names) > DEEPEST:
        reason = f"it is {len(names):,} folders deep, and {DEEPEST} are allowed"
    elif len(os.fsencode(path)) > LONGEST_PATH or any(len(name) > LONGEST_NAME for name in names):
        reason = f"a name has at most {LONGEST_NAME} bytes, and all of it {LONGEST_PATH:,}"
    if reason:
        raise UsageError(f"{shown(str(path))} cannot be a path: {reason}")
    return path


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
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no folders, and writes names down by itself
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
