"""Unpack one file from an archive, for each kind of archive. A damaged archive raises SourceError."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from manyhands.data.source import SourceError, Unpack


@contextmanager
def damage() -> Iterator[None]:
    """Turn errors of decoders into SourceError, but not errors of the disk."""
    try:
        yield
    except (EOFError, ValueError, KeyError, zlib.error, tarfile.TarError, gzip.BadGzipFile) as error:
        raise SourceError(f"damaged archive ({error})") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise SourceError(f"damaged archive ({error})") from error  # errors of image decoders have no errno


def gunzip(archive: Path, file: str, output: Path) -> None:
    """One file, compressed with gzip."""
    del file
    with damage(), gzip.open(archive) as stream, output.open("wb") as target:
        shutil.copyfileobj(stream, target)


def tar_members(members: Mapping[str, Sequence[str]]) -> Unpack:
    """A tar file in which a file is the concatenation of some members."""

    def unpack(archive: Path, file: str, output: Path) -> None:
        with damage(), tarfile.open(archive) as tar, output.open("wb") as target:
            for member in members[file]:
                shutil.copyfileobj(member_of(tar, member), target)

    return unpack


def tar_folder(folder: str) -> Unpack:
    """A tar file with the files in one folder."""

    def unpack(archive: Path, file: str, output: Path) -> None:
        tar_members({file: [f"{folder}/{file}"]})(archive, file, output)

    return unpack


def debian_folder(folder: str) -> Unpack:
    """A Debian package with the files in one folder, each compressed with gzip."""

    def unpack(archive: Path, file: str, output: Path) -> None:
        if shutil.which("dpkg-deb") is None:
            raise SourceError("dpkg-deb is not installed")
        command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
        with (
            damage(),
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process,
        ):
            assert process.stdout is not None
            with tarfile.open(fileobj=process.stdout, mode="r|") as tar, output.open("wb") as target:
                member = next((m for m in tar if m.name == f"./{folder}/{file}.gz"), None)
                if member is None:
                    raise KeyError(f"it contains no {file}.gz")
                with gzip.open(_open(tar, member)) as stream:
                    shutil.copyfileobj(stream, target)

    return unpack


def member_of(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    """A member of a tar file, opened."""
    return _open(tar, tar.getmember(name))


def _open(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    stream = tar.extractfile(member)
    if stream is None:
        raise tarfile.ReadError(f"{member.name} is not a file")
    return stream
