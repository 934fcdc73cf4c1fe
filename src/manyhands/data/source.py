"""The interface of a data source: how to download an archive and how to unpack a file from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

Unpack = Callable[[Path, str, Path], None]
"""`unpack(archive, file, output)` writes the file of this name in the archive to `output`."""


class SourceError(Exception):
    """Why a source failed, in a few words. The next source is tried."""


class Source(Protocol):
    """One source of a data set."""

    @property
    def label(self) -> str:
        """Its name in messages."""

    @property
    def unpack(self) -> Unpack:
        """How to unpack a file from the archive."""

    def fetch(self, file: str, folder: Path) -> Path:
        """Download the archive that contains this file into the folder, unless it is there."""
