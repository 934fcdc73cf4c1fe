"""Data sets in the cache folder: verified by checksum, downloaded from one source after the other."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pooch
from rich.console import Console

from manyhands.core import file_locks
from manyhands.core.errors import DataUnavailableError, StorageError
from manyhands.data import catalog
from manyhands.data.catalog import Content, DatasetEntry
from manyhands.data.mirror import Mirror
from manyhands.data.source import SourceError, Unpack
from manyhands.data.unpack import gunzip

pooch.get_logger().setLevel(logging.WARNING)


def cache_folder() -> Path:
    """The cache folder: `$MANYHANDS_CACHE`, or the default of the system."""
    chosen = os.environ.get("MANYHANDS_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else Path(pooch.os_cache("manyhands"))


def present(name: str) -> bool:
    """Whether a data set is in the cache, by the sizes of its files: fast, without checksums."""
    folder = cache_folder() / name
    return all(_has_size(folder, content) for content in catalog.entry(name).contents)


def fetch(entry: DatasetEntry) -> dict[str, Path]:
    """The paths of the files of a data set. Missing or damaged files are downloaded."""
    folder = cache_folder() / entry.name
    try:
        # First without the lock: a complete cache may be on a read-only disk.
        if not all(_intact(folder, content) for content in entry.contents):
            with _locked(entry.name, folder):
                _complete(entry, folder)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise StorageError(
            f"cannot store {entry.name} in {folder}: {reason} (set MANYHANDS_CACHE to use another folder)"
        ) from error
    return {content.file: folder / content.file for content in entry.contents}


def say(line: str) -> None:
    """Print a progress message to stderr; stdout is for results."""
    Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _locked(name: str, folder: Path) -> Iterator[None]:
    """One process or thread at a time per data set. The lock is released when its holder ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        if not file_locks.take(lock.fileno()):
            say(f"waiting for another process that is downloading {name} ...")
            file_locks.take(lock.fileno(), wait=True)
        yield


def _complete(entry: DatasetEntry, folder: Path) -> None:
    missing = [content for content in entry.contents if not _intact(folder, content)]
    if not missing:
        return  # another process has downloaded them meanwhile
    failures = _damaged(entry, missing, folder)
    missing = _place_by_hand(entry, missing, folder, failures)
    if missing:
        say(f"downloading {entry.name} ({entry.megabytes} MB) ...")
        missing = _place_from_sources(entry, missing, folder, failures)
    if missing:
        raise DataUnavailableError(_sentence(entry, missing, folder, failures))
    shutil.rmtree(_incoming(folder), ignore_errors=True)


def _damaged(entry: DatasetEntry, missing: list[Content], folder: Path) -> list[str]:
    """Report files with a wrong checksum at once: the user may have put them there."""
    files = [content.file for content in missing if (folder / content.file).exists()]
    for file in files:
        say(f"{entry.name}: {file} in the cache is damaged and will be downloaded again")
    return [f"{file} in the cache: wrong checksum" for file in files]


def _place_by_hand(
    entry: DatasetEntry, missing: list[Content], folder: Path, failures: list[str]
) -> list[Content]:
    """Use files that the user put into the folder. Return what is still missing."""
    still = []
    for content in missing:
        for name, unpack in _hand_names(entry, content.file).items():
            if not (folder / name).exists():
                continue
            try:
                _place(content, folder / name, unpack, folder)
                break
            except SourceError as error:
                failures.append(f"{name} in the cache: {error}")
        else:
            still.append(content)
    return still


def _place_from_sources(
    entry: DatasetEntry, missing: list[Content], folder: Path, failures: list[str]
) -> list[Content]:
    """Download missing files from each source in turn, until it fails. Return what is still missing."""
    remaining = list(missing)
    for source in entry.sources:
        try:
            while remaining:
                archive = source.fetch(remaining[0].file, _incoming(folder))
                try:
                    _place(remaining[0], archive, source.unpack, folder)
                except SourceError:
                    archive.unlink(missing_ok=True)  # otherwise it would be used again next time
                    raise
                remaining.pop(0)
        except SourceError as error:
            failures.append(f"{source.label}: {error}")
    return remaining


def _place(content: Content, archive: Path, unpack: Unpack, folder: Path) -> None:
    """Unpack next to the final path. pooch verifies the content and renames it."""

    def downloader(url: str, output: str, _: object) -> None:
        del url
        Path(output).unlink()  # only its owner could read it, but a cache may be shared: create it again
        unpack(archive, content.file, Path(output))

    try:
        pooch.retrieve(
            url=archive.as_uri(),
            known_hash=f"sha256:{content.sha256}",
            fname=content.file,
            path=folder,
            downloader=downloader,
        )
    except ValueError as error:
        raise SourceError("wrong checksum") from error


def _sentence(entry: DatasetEntry, missing: list[Content], folder: Path, failures: list[str]) -> str:
    absent = [
        content.file
        for content in missing
        if not any((folder / name).exists() for name in _hand_names(entry, content.file))
    ] or [content.file for content in missing]
    also = dict.fromkeys(
        ".gz" if name == f"{file}.gz" else name for file in absent for name in _hand_names(entry, file)
    )
    by_hand = f"put {', '.join(absent)} (or {' or '.join(also)}) into {folder} by hand"
    return f"cannot get {entry.name}: {'; '.join([*failures, by_hand])}"


def _hand_names(entry: DatasetEntry, file: str) -> dict[str, Unpack]:
    """Files that the user may put into the folder instead: the archive of a mirror, or a .gz file."""
    mirrors = [source for source in entry.sources if isinstance(source, Mirror)]
    return {mirror.archive_name(file): mirror.unpack for mirror in mirrors} | {f"{file}.gz": gunzip}


def _incoming(folder: Path) -> Path:
    """The folder of archives and partial downloads, until all files are complete."""
    return folder / "incoming"


def _intact(folder: Path, content: Content) -> bool:
    path = folder / content.file
    return _has_size(folder, content) and bool(pooch.file_hash(str(path), alg="sha256") == content.sha256)


def _has_size(folder: Path, content: Content) -> bool:
    path = folder / content.file
    return path.is_file() and path.stat().st_size == content.size
