"""A page of memory where every worker of this host writes its status: it outlives them, to the last step.

The status that a worker sends over its connection is a moment old, and a killed worker sends no last message.
The page is memory of the leader without a name in any folder. A worker opens it through the leader's
descriptor, and writes only if a secret on the page shows that it is the right one.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import final

from manyhands.core.rank_info import STATUS, RankStatus

SECRET = 16  # bytes at the beginning
SLOT = 64  # bytes per worker: a cache line

PageAddress = tuple[str, bytes]  # the path of the page, and its secret


@final
class StatusPage:
    """The leader's end of the page; on systems without such memory (macOS) there is no page."""

    def __init__(self, size: int) -> None:
        self.address: PageAddress | None = None
        self._page: mmap.mmap | None = None
        self._descriptor = -1
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("manyhands-status")
            os.ftruncate(self._descriptor, SLOT * (size + 1))
            self._page = mmap.mmap(self._descriptor, SLOT * (size + 1))
            secret = os.urandom(SECRET)
            self._page[:SECRET] = secret
            self.address = (f"/proc/{os.getpid()}/fd/{self._descriptor}", secret)

    def read(self, rank: int) -> RankStatus | None:
        """The last status that a worker wrote; None if it never did."""
        if self._page is None:
            return None
        step, calls, phase, operation = STATUS.unpack_from(self._page, SLOT * (rank + 1))
        if not phase.rstrip(b"\0"):
            return None
        doing = f"{_text(operation)} {calls:,}" if operation.rstrip(b"\0") else ""
        return RankStatus(step, _text(phase), doing)

    def clear(self, rank: int) -> None:
        """Erase a worker's status, which is not that of its replacement."""
        if self._page is not None:
            self._page[SLOT * (rank + 1) : SLOT * (rank + 2)] = bytes(SLOT)

    def close(self) -> None:
        """Release the page; workers that still have it write into memory that is not read."""
        if self._page is not None:
            self._page.close()
            os.close(self._descriptor)
            self._page = None


def slot(address: PageAddress | None, rank: int) -> memoryview | None:
    """A worker's own part of the page; None if the page is on another host, or there is none."""
    if address is None:
        return None
    path, secret = address
    try:
        with Path(path).open("r+b") as file:
            page = mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):
        return None
    if page[:SECRET] != secret or len(page) < SLOT * (rank + 2):
        return None
    return memoryview(page)[SLOT * (rank + 1) : SLOT * (rank + 2)]


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
