"""Content files in a cache folder: checked by their checksums, fetched from one source after the other."""

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
    """Where data sets are kept: `$MANYHANDS_CACHE`, or the system's folder for caches."""
    chosen = os.environ.get("MANYHANDS_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else Path(pooch.os_cache("manyhands"))


def present(name: str) -> bool:
    """Whether a data set lies in the cache, by the sizes of its files: quick, and without a checksum."""
    folder = cache_folder() / name
    return all(_has_size(folder, content) for content in catalog.entry(name).contents)


def fetch(entry: DatasetEntry) -> dict[str, Path]:
    """The paths of a data set's content files, each checked, and fetched where it is missing or damaged."""
    folder = cache_folder() / entry.name
    try:
        # Without the lock first: a cache that is complete may be on a disk that cannot be written.
        if not all(_intact(folder, content) for content in entry.contents):
            with _locked(entry.name, folder):
                _complete(entry, folder)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise StorageError(
            f"cannot keep {entry.name} in {folder}: {reason} (MANYHANDS_CACHE names another folder)"
        ) from error
    return {content.file: folder / content.file for content in entry.contents}


def say(line: str) -> None:
    """Tell a person what takes a while; stdout is for results."""
    Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _locked(name: str, folder: Path) -> Iterator[None]:
    """One process (or thread) a data set; the lock goes with its holder, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        if not file_locks.take(lock.fileno()):
            say(f"waiting for another process that is fetching {name} ...")
            file_locks.take(lock.fileno(), wait=True)
        yield


def _complete(entry: DatasetEntry, folder: Path) -> None:
    missing = [content for content in entry.contents if not _intact(folder, content)]
    if not missing:
        return  # another process brought them while this one waited for the lock
    failures = _damaged(entry, missing, folder)
    missing = _place_by_hand(entry, missing, folder, failures)
    if missing:
        say(f"fetching {entry.name} ({entry.megabytes} MB) ...")
        missing = _place_from_sources(entry, missing, folder, failures)
    if missing:
        raise DataUnavailableError(_sentence(entry, missing, folder, failures))
    shutil.rmtree(_incoming(folder), ignore_errors=True)


def _damaged(entry: DatasetEntry, missing: list[Content], folder: Path) -> list[str]:
    """Files that are there but wrong: said at once, since someone may have put them there."""
    files = [content.file for content in missing if (folder / content.file).exists()]
    for file in files:
        say(f"{entry.name}: {file} in the cache is damaged, so it is fetched again")
    return [f"{file} in the cache: wrong checksum" for file in files]


def _place_by_hand(
    entry: DatasetEntry, missing: list[Content], folder: Path, failures: list[str]
) -> list[Content]:
    """Use what a person put into the folder; returns what is still missing."""
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
    """Ask each source for what is still missing; the first failure of a source ends its turn."""
    remaining = list(missing)
    for source in entry.sources:
        try:
            while remaining:
                archive = source.fetch(remaining[0].file, _incoming(folder))
                try:
                    _place(remaining[0], archive, source.unpack, folder)
                except SourceError:
                    archive.unlink(missing_ok=True)  # or it would be taken for a good one the next time
                    raise
                remaining.pop(0)
        except SourceError as error:
            failures.append(f"{source.label}: {error}")
    return remaining


def _place(content: Content, archive: Path, unpack: Unpack, folder: Path) -> None:
    """Unpack beside the final path; pooch checks the content and moves it there in one step."""

    def downloader(url: str, output: str, _: object) -> None:
        del url
        Path(output).unlink()  # readable by its owner alone, but a cache may be shared: write it anew
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
    """What a person may put into the folder instead of a content file: a mirror's archive, or gzip's."""
    mirrors = [source for source in entry.sources if isinstance(source, Mirror)]
    return {mirror.archive_name(file): mirror.unpack for mirror in mirrors} | {f"{file}.gz": gunzip}


def _incoming(folder: Path) -> Path:
    """Archives and parts of archives, until all content is in its place."""
    return folder / "incoming"


def _intact(folder: Path, content: Content) -> bool:
    path = folder / content.file
    return _has_size(folder, content) and bool(pooch.file_hash(str(path), alg="sha256") == content.sha256)


def _has_size(folder: Path, content: Content) -> bool:
    path = folder / content.file
    return path.is_file() and path.stat().st_size == content.size
