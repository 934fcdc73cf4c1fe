"""Flags in shared memory by which the workers of one host meet, and how each notices that another is gone.

    line 0   [ arrivals of worker 0 | unused ...      ]     64 bytes: a cache line each, so that a worker
    line 1   [ arrivals of worker 1 | unused ...      ]     who writes its own does not slow down those
    line n.. [ words of the mailboxes ]                     who read another's
    last     [ the bell ]

Each worker holds a lock on byte `rank` of the file for as long as it lives: the kernel gives it up with the
process, however that ends, so a lock that can be had belongs to a worker who is gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

from manyhands.transports.shm.futex import FutexEvent
from manyhands.transports.waiting import Wait, fence, late, lost, poll, spins, yielding

LINE = 64  # bytes of a cache line
WORDS = LINE // 8


def claim(fd: int, rank: int) -> None:
    """Be alive for all to see: whoever waits for a worker that has not done this takes it for dead."""
    fcntl.lockf(fd, fcntl.LOCK_EX, 1, rank)


@final
class SyncFlags:
    """One worker's hold on the flags of its host; it has claimed its byte already."""

    def __init__(
        self, fd: int, mapped: mmap.mmap, nbytes: int, rank: int, names: Sequence[int], timeout: float
    ) -> None:
        self.fd = fd
        self.flags = memoryview(mapped)[:nbytes].cast("Q")
        self.doing = ""
        self.calls: Counter[str] = Counter()
        self._rank, self._names, self._timeout = rank, names, timeout
        self._spins, self._yielding = spins(len(names)), yielding(len(names))
        self.bell = FutexEvent(mapped, nbytes - LINE, rank, len(names))
        self._arrived = 0
        self._mine = rank * WORDS
        self._others = tuple(peer * WORDS for peer in range(len(names)) if peer != rank)

    def begin(self, operation: str) -> None:
        """From now on waits are for this."""
        self.doing = operation
        self.calls[operation] += 1

    def meet(self) -> None:
        """Return when all have come here."""
        self._arrived = arrived = self._arrived + 1
        flags = self.flags
        fence()
        flags[self._mine] = arrived
        for flag in self._others:
            if flags[flag] < arrived:
                self.wait(flag, arrived)
        fence()

    def wait(self, flag: int, target: int, whom: int | None = None) -> None:
        """Return when a flag has come so far; it is raised by this worker, or in a meeting by any."""
        flags = self.flags
        for _ in range(self._spins):
            if flags[flag] >= target:
                return
        wait = Wait(self._timeout, self._yielding)
        while flags[flag] < target:
            if not wait.rest():
                continue
            gone = [peer for peer in self._missing(flag, target, whom) if self._gone(peer)]
            missing = self._missing(flag, target, whom)  # who raised the flag and then left is not missed
            if any(peer in missing for peer in gone):
                raise lost(self.said, [self._names[peer] for peer in gone if peer in missing])
            if missing and wait.over:
                raise late(self._timeout, self.said, [self._names[peer] for peer in missing])

    def first(self, found: Callable[[], int | None]) -> int:
        """The peer that is found; as long as there is none, some of them are alive or nobody will be."""
        wait = Wait(self._timeout, self._yielding)
        while (peer := found()) is None:
            if not wait.rest():
                continue
            others = [line // WORDS for line in self._others]
            if all(self._gone(peer) for peer in others) and found() is None:
                raise lost(self.said, [self._names[peer] for peer in others])
            if wait.over:
                raise late(self._timeout, self.said)
        return peer

    @property
    def said(self) -> str:
        """`barrier 2,408`."""
        return f"{self.doing} {self.calls[self.doing]:,}"

    @contextmanager
    def exclusive(self, number: int) -> Iterator[None]:
        """Hold the lock on a byte behind those of the workers; the kernel gives it up with the process."""
        byte = len(self._names) + number
        fcntl.lockf(self.fd, fcntl.LOCK_EX, 1, byte)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, byte)

    def until(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Look until it is so, at most so long."""
        return poll(ready, seconds, self._spins, self._yielding)

    def close(self) -> None:
        """Leave in good order: whoever still waits for this worker learns that it is gone."""
        self.flags.release()
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, self._rank)
        os.close(self.fd)

    def _missing(self, flag: int, target: int, whom: int | None) -> list[int]:
        if whom is not None:
            return [whom] if self.flags[flag] < target else []
        return [other // WORDS for other in self._others if self.flags[other] < target]

    def _gone(self, peer: int) -> bool:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, peer)
        except OSError:
            return False
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, peer)
        return True
