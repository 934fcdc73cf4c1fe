"""Files that are either whole or not there: written beside their place, then moved into it (law 6)."""

from __future__ import annotations

import contextlib
import os
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


def remove_partial(folder: Path) -> None:
    """Remove what a process that was killed in the middle of writing left behind."""
    for leftover in folder.glob(".*.partial"):
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
