"""A public mirror: an archive over HTTP. An interrupted download is continued."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import requests
import urllib3
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from manyhands.data.source import SourceError, Unpack

CONNECT_SECONDS = 5
READ_SECONDS = 30
ATTEMPTS = 5
BLOCK = 1 << 16


@dataclass(frozen=True)
class Mirror:
    """A URL with `{file}` for the name of a file. An archive of several files has no `{file}`."""

    url: str
    unpack: Unpack

    @property
    def label(self) -> str:
        """`mirror example.org`."""
        return f"mirror {urlsplit(self.url).netloc}"

    def archive_name(self, file: str) -> str:
        """The file name of the archive, as a manual download would save it."""
        return urlsplit(self.url.format(file=file)).path.rsplit("/", 1)[-1]

    def fetch(self, file: str, folder: Path) -> Path:
        """Download into a folder per mirror, because their compressed bytes differ."""
        url = self.url.format(file=file)
        archive = folder / urlsplit(url).netloc / self.archive_name(file)
        if not archive.exists():
            archive.parent.mkdir(parents=True, exist_ok=True)
            part = archive.with_name(f"{archive.name}.part")
            download(url, part)
            part.replace(archive)
        return archive


def download(url: str, part: Path) -> None:
    """Complete the partial file `part`. It is kept if the connection fails."""
    for _ in range(ATTEMPTS):
        before = _size(part)
        try:
            _continue(url, part)
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            if _size(part) <= before:  # no progress: do not try again
                raise SourceError(_reason(error)) from error
        else:
            return
    raise SourceError(f"the connection dropped {ATTEMPTS} times")


def _continue(url: str, part: Path) -> None:
    start = _size(part)
    # Ranges count the bytes that are sent, so these must not be compressed again.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    with requests.get(url, headers=headers, stream=True, timeout=(CONNECT_SECONDS, READ_SECONDS)) as response:
        content_range = response.headers.get("Content-Range", "")
        if start and response.status_code == requests.codes.requested_range_not_satisfiable:
            if content_range != f"bytes */{start}":
                part.unlink()
                _continue(url, part)
            return  # the file was complete, but not renamed yet
        response.raise_for_status()
        continued = response.status_code == requests.codes.partial_content
        if continued and not content_range.startswith(f"bytes {start}-"):
            part.unlink()
            raise SourceError(f"the server sent the range {content_range!r}")
        if not continued:
            start = 0  # the server ignores ranges and sends the whole file
        _save(response, part, start)


def _save(response: requests.Response, part: Path, start: int) -> None:
    length = response.headers.get("Content-Length")
    total = start + int(length) if length is not None else None
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with (
        part.open("ab" if start else "wb") as file,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        bar = progress.add_task(part.stem, total=total, completed=start)
        for block in _blocks(response):
            file.write(block)
            progress.advance(bar, len(block))
    if total is not None and _size(part) != total:
        raise requests.ConnectionError(f"received {_size(part)} of {total} bytes")


def _blocks(response: requests.Response) -> Iterator[bytes]:
    # A server may declare a .gz file as an encoding. It is not decoded, or ranges would not match.
    yield from response.raw.stream(BLOCK, decode_content=False)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: Exception) -> str:
    """The cause of a failed request, in a few words."""
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"{error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.ConnectTimeout):
        return f"no connection within {CONNECT_SECONDS} s"
    if isinstance(error, (requests.ReadTimeout, urllib3.exceptions.ReadTimeoutError)):
        return f"no answer within {READ_SECONDS} s"
    causes = list(_causes(error))
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return "no such host"
    reasons = [c.strerror for c in causes if isinstance(c, OSError) and isinstance(c.strerror, str)]
    return reasons[-1].lower() if reasons else "the connection dropped"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
