"""A gate in shared memory at which the workers of a run sleep between two blocks of a measurement.

The parent opens the gate for a block, closes it, and at last ends the run. Each worker comes to the gate
after every step, and writes what it has done in this block into its own slot. The parent reads the slots when
the workers sleep:

    parent   open ........................ close                open ...
    rank 0        step step step step step step | sleeps             | step step
                      ^ first mark              ^ last mark: what lies between them is the block

The first step of a block is not counted: the caches are cold. Every word has one writer at a time, and is
written as a whole.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path
from typing import NamedTuple, final

from manyhands.core.atomic_files import open_regular

NAP = 0.01  # seconds between two looks of a worker that sleeps at the gate
WORDS = 8  # of a slot, of eight bytes each: no two slots share a cache line
# the head: number of the open block or 0; whether the run is over; sleep after this step; time it was closed
_OPEN, _OVER, _LAST, _CLOSED = range(4)
_BLOCK, _ENDED, _STEPS, _SAMPLES, _TIME = range(5)  # a slot


class Progress(NamedTuple):
    """What a worker has done, in all or in one block."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0


def _mapped(path: Path, ranks: int, flags: int = 0) -> list[ctypes.Array[ctypes.c_int64]]:
    """The head and the slots of a gate: a small file that all processes of a run map."""
    size = ctypes.sizeof(ctypes.c_int64) * WORDS
    descriptor = open_regular(path, os.O_RDWR | flags)
    try:
        if flags:
            os.ftruncate(descriptor, size * (ranks + 1))
        memory = mmap.mmap(descriptor, size * (ranks + 1))
    finally:
        os.close(descriptor)
    return [(ctypes.c_int64 * WORDS).from_buffer(memory, size * part) for part in range(ranks + 1)]


@final
class PauseGate:
    """The parent's side. The gate is closed at first."""

    def __init__(self, path: Path, ranks: int) -> None:
        self.path, self.ranks = path, ranks
        self._head, *self._slots = _mapped(path, ranks, os.O_CREAT | os.O_TRUNC)
        self._block = 0
        self._closed_at: int | None = None

    def open(self) -> None:
        """Let the workers run a new block."""
        self._block += 1
        if self._closed_at is not None:
            self._head[_CLOSED] += time.monotonic_ns() - self._closed_at
        self._closed_at = None
        self._head[_LAST] = 0
        self._head[_OPEN] = self._block  # last: a worker that sees it may go on

    def close(self) -> None:
        """Let the workers sleep after one of the next steps."""
        self._head[_OPEN] = 0
        self._closed_at = time.monotonic_ns()

    def end(self) -> None:
        """Let the run end."""
        self._head[_OVER] = 1
        self.open()

    def progress(self, rank: int) -> Progress:
        """What a worker has done in the current block, or in the last one."""
        slot = self._slots[rank]
        if slot[_BLOCK] != self._block:
            return Progress()
        return Progress(slot[_STEPS], slot[_SAMPLES], slot[_TIME] / 1e9)

    def is_asleep(self, rank: int) -> bool:
        """Whether a worker has ended the last block and sleeps."""
        return self._block > 0 and self._slots[rank][_ENDED] == self._block


@final
class WorkerGate:
    """A worker's side."""

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        self._head, *slots = _mapped(path, ranks)
        self._slot, self._leads = slots[rank], rank == 0
        self._block = -1
        self._first = Progress()  # the totals at the first mark of the block

    @property
    def over(self) -> bool:
        """Whether the run is to end."""
        return bool(self._head[_OVER])

    @property
    def seconds_closed(self) -> float:
        """For how long the gate was closed, in all."""
        return self._head[_CLOSED] / 1e9

    def mark(self, totals: Progress) -> None:
        """Write what this worker has done since its first step of this block."""
        block = self._head[_OPEN] or self._block
        if block != self._block:
            self._block, self._first = block, totals
        slot, first = self._slot, self._first
        slot[_STEPS], slot[_SAMPLES] = totals.steps - first.steps, totals.samples - first.samples
        slot[_TIME] = round((totals.seconds - first.seconds) * 1e9)
        slot[_BLOCK] = self._block

    def is_closed(self, step: int, together: bool, shared: bool = True) -> bool:
        """Whether a worker sleeps after this step.

        Workers that step together all sleep after the same step: one that waits for a peer that sleeps would
        count that as waiting. So rank 0 announces a step, and all sleep after the first one from there on
        that is `shared`, in which all exchange something. No other worker can have finished that one, because
        rank 0 has not begun it; in steps that are not shared, as of local SGD, it may be ahead of rank 0.
        """
        head = self._head
        if head[_OPEN] or head[_OVER]:
            return False
        if not together:
            return True
        last = head[_LAST]
        if last == 0 and self._leads:
            head[_LAST] = step + 1
        return shared and 0 < last <= step

    def sleep(self, seconds: float) -> bool:
        """Sleep until the gate opens, but not longer than this. Return whether it is open."""
        self._slot[_ENDED] = self._block
        end = time.monotonic() + seconds
        while not self._head[_OPEN]:
            if time.monotonic() >= end:
                return False
            time.sleep(NAP)
        return True
