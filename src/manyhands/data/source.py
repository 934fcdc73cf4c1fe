"""What a source of data is to a download: a way to an archive, and from the archive to a content file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

Unpack = Callable[[Path, str, Path], None]
"""`unpack(archive, file, output)` writes the content file of this name, found in the archive, to output."""


class SourceError(Exception):
    """Why one source failed, in a few words; the next source is tried."""


class Source(Protocol):
    """One place that has a data set."""

    @property
    def label(self) -> str:
        """What a person calls it."""

    @property
    def unpack(self) -> Unpack:
        """How content is found in what `fetch` brings."""

    def fetch(self, file: str, folder: Path) -> Path:
        """The archive that holds this content file, brought into the folder unless it is there already."""
