"""A page on which every worker of this host writes what it is doing: it outlives them, to the last step.

What a worker says over its line is a moment old, and one that is killed has no last words. The page is memory
of the leader's without a name in any folder; a worker finds it through the leader's descriptor, and writes
only where a secret on it shows that it is the right one.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import final

from manyhands.core.rank_info import STATUS, RankStatus

SECRET = 16  # bytes at the beginning
SLOT = 64  # bytes a worker: a cache line

Address = tuple[str, bytes]  # where the page is, and its secret


@final
class StatusPage:
    """The leader's hold on the page; where there is no such memory (macOS), there is no page."""

    def __init__(self, size: int) -> None:
        self.address: Address | None = None
        self._page: mmap.mmap | None = None
        self._descriptor = -1
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("manyhands-board")
            os.ftruncate(self._descriptor, SLOT * (size + 1))
            self._page = mmap.mmap(self._descriptor, SLOT * (size + 1))
            secret = os.urandom(SECRET)
            self._page[:SECRET] = secret
            self.address = (f"/proc/{os.getpid()}/fd/{self._descriptor}", secret)

    def read(self, rank: int) -> RankStatus | None:
        """What a worker wrote last; None where it never did."""
        if self._page is None:
            return None
        step, calls, phase, operation = STATUS.unpack_from(self._page, SLOT * (rank + 1))
        if not phase.rstrip(b"\0"):
            return None
        doing = f"{_text(operation)} {calls:,}" if operation.rstrip(b"\0") else ""
        return RankStatus(step, _text(phase), doing)

    def wipe(self, rank: int) -> None:
        """What a worker wrote is not what the one in its place is doing."""
        if self._page is not None:
            self._page[SLOT * (rank + 1) : SLOT * (rank + 2)] = bytes(SLOT)

    def close(self) -> None:
        """Give the page back; workers that still have it write into nothing."""
        if self._page is not None:
            self._page.close()
            os.close(self._descriptor)
            self._page = None


def slot(address: Address | None, rank: int) -> memoryview | None:
    """A worker's own part of the page; None where that is on another host, or nobody has one."""
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


def _text(letters: bytes) -> str:
    return letters.rstrip(b"\0").decode(errors="replace")
