"""Flags in shared memory that synchronize the workers of one host, and locks that tell which are alive.

    line 0   [ barriers that worker 0 has reached | unused ... ]     a cache line (64 bytes) each, so that
    line 1   [ barriers that worker 1 has reached | unused ... ]     writing one does not slow down the
    line n.. [ words of the mailboxes ]                              readers of another
    last     [ the futex event ]

Each worker holds a lock on byte `rank` of the file while it lives. The kernel releases it when the process
ends, whatever the reason. So if a lock is free, its worker is gone.
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
from manyhands.transports.waiting import Wait, deadline_error, fence, peer_lost_error, poll, spins, yielding

LINE = 64  # bytes of a cache line
WORDS = LINE // 8


def hold_alive_lock(fd: int, rank: int) -> None:
    """Show that this worker is alive. Until it has called this, its peers take it for dead."""
    fcntl.lockf(fd, fcntl.LOCK_EX, 1, rank)


@final
class SyncFlags:
    """One worker's view of the flags of its host. It holds its alive lock already.

    `group_ranks` are the ranks of the workers in the whole group: error messages name them.
    """

    def __init__(
        self, fd: int, mapped: mmap.mmap, nbytes: int, rank: int, group_ranks: Sequence[int], timeout: float
    ) -> None:
        self.fd = fd
        self.flags = memoryview(mapped)[:nbytes].cast("Q")
        self._operation = ""
        self.calls: Counter[str] = Counter()
        self._rank, self._group_ranks, self._timeout = rank, group_ranks, timeout
        self._spins, self._yielding = spins(len(group_ranks)), yielding(len(group_ranks))
        self.event = FutexEvent(mapped, nbytes - LINE, rank, len(group_ranks))
        self._barriers = 0
        self._mine = rank * WORDS
        self._others = tuple(peer * WORDS for peer in range(len(group_ranks)) if peer != rank)

    def begin(self, operation: str) -> None:
        """Name the operation of the waits that follow."""
        self._operation = operation
        self.calls[operation] += 1

    def barrier(self) -> None:
        """Return when all workers have called it."""
        self._barriers = reached = self._barriers + 1
        flags = self.flags
        fence()
        flags[self._mine] = reached
        for flag in self._others:
            if flags[flag] < reached:
                self.wait(flag, reached)
        fence()

    def wait(self, flag: int, target: int, peer: int | None = None) -> None:
        """Return when a flag has reached a value. `peer` writes it; in a barrier, any worker does."""
        flags = self.flags
        for _ in range(self._spins):
            if flags[flag] >= target:
                return
        wait = Wait(self._timeout, self._yielding)
        while flags[flag] < target:
            if not wait.rest():
                continue
            gone = [other for other in self._missing(flag, target, peer) if self._is_gone(other)]
            missing = self._missing(flag, target, peer)  # again: a worker may raise its flag and then leave
            if any(other in missing for other in gone):
                lost = [self._group_ranks[other] for other in gone if other in missing]
                raise peer_lost_error(self.call, lost)
            if missing and wait.expired:
                late = [self._group_ranks[other] for other in missing]
                raise deadline_error(self._timeout, self.call, late)

    def wait_for_any(self, find: Callable[[], int | None]) -> int:
        """Return the first peer that `find` returns. Fail if all peers are gone and it finds none."""
        wait = Wait(self._timeout, self._yielding)
        while (peer := find()) is None:
            if not wait.rest():
                continue
            others = [flag // WORDS for flag in self._others]
            if all(self._is_gone(other) for other in others) and find() is None:
                raise peer_lost_error(self.call, [self._group_ranks[other] for other in others])
            if wait.expired:
                raise deadline_error(self._timeout, self.call)
        return peer

    @property
    def call(self) -> str:
        """The current operation and how often it was called: `barrier 2,408`."""
        return f"{self._operation} {self.calls[self._operation]:,}"

    @contextmanager
    def lock(self, number: int) -> Iterator[None]:
        """Hold a lock on a byte after those of the workers. The kernel releases it with the process."""
        byte = len(self._group_ranks) + number
        fcntl.lockf(self.fd, fcntl.LOCK_EX, 1, byte)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, byte)

    def poll(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Check until `ready()` is true, for at most `seconds`. Return whether it was."""
        return poll(ready, seconds, self._spins, self._yielding)

    def close(self) -> None:
        """Release the flags and the alive lock: peers that still wait for this worker fail."""
        self.flags.release()
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, self._rank)
        os.close(self.fd)

    def _missing(self, flag: int, target: int, peer: int | None) -> list[int]:
        if peer is not None:
            return [peer] if self.flags[flag] < target else []
        return [other // WORDS for other in self._others if self.flags[other] < target]

    def _is_gone(self, peer: int) -> bool:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, peer)
        except OSError:
            return False
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, peer)
        return True
