"""From an archive to one content file, for each kind of archive; a damaged archive is said to be damaged."""

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
    """Tell what a decoder says of bad bytes from what a disk says of a file that cannot be written."""
    try:
        yield
    except (EOFError, ValueError, KeyError, zlib.error, tarfile.TarError, gzip.BadGzipFile) as error:
        raise SourceError(f"damaged archive ({error})") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise SourceError(f"damaged archive ({error})") from error  # decoders of pictures have no errno


def gunzip(archive: Path, file: str, output: Path) -> None:
    """The content file alone, compressed with gzip."""
    del file
    with damage(), gzip.open(archive) as stream, output.open("wb") as target:
        shutil.copyfileobj(stream, target)


def tar_members(members: Mapping[str, Sequence[str]]) -> Unpack:
    """A tar file in which a content file is some members, one after the other."""

    def unpack(archive: Path, file: str, output: Path) -> None:
        with damage(), tarfile.open(archive) as tar, output.open("wb") as target:
            for member in members[file]:
                shutil.copyfileobj(member_of(tar, member), target)

    return unpack


def tar_folder(folder: str) -> Unpack:
    """A tar file that has the content files in one folder."""

    def unpack(archive: Path, file: str, output: Path) -> None:
        tar_members({file: [f"{folder}/{file}"]})(archive, file, output)

    return unpack


def debian_folder(folder: str) -> Unpack:
    """A Debian package that has the content files in one folder, each compressed with gzip."""

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
                    raise KeyError(f"no {file}.gz in it")
                with gzip.open(_open(tar, member)) as stream:
                    shutil.copyfileobj(stream, target)

    return unpack


def member_of(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    """An open member of a tar file, by its name."""
    return _open(tar, tar.getmember(name))


def _open(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    stream = tar.extractfile(member)
    if stream is None:
        raise tarfile.ReadError(f"{member.name} is not a file")
    return stream
