"""Messages between two workers of one host: a ring of slots in shared memory for each ordered pair.

    sender's line    [ sent  | size | size | size | size ]     the number of parts sent, and for each slot
    receiver's line  [ taken | unused ...                ]     the size of the whole message
    ring             [ slot 0 | slot 1 | slot 2 | slot 3 ]     part p is in slot p mod 4

A send returns when its last part is in the ring. Small messages do not wait, large ones stream through.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from manyhands.core.errors import ManyhandsError
from manyhands.transports.shm import segment
from manyhands.transports.shm.sync_flags import WORDS, SyncFlags
from manyhands.transports.waiting import fence

SLOTS = 4
SLOT = 2**18  # bytes
RING = SLOTS * SLOT
LINES = 2  # cache lines of flags per pair


@final
class Mailboxes:
    """All rings of a host, as one worker uses them. A ring allocates its memory at the first message."""

    def __init__(
        self, sync: SyncFlags, first_line: int, file: Tensor, start: int, rank: int, size: int
    ) -> None:
        self._sync, self._first_line, self._file, self._start = sync, first_line, file, start
        self._rank, self._size = rank, size
        self._sent, self._taken = [0] * size, [0] * size
        self._slots: dict[int, list[Tensor]] = {}

    def send(self, message: Tensor, to: int) -> None:
        """Write a row of bytes into the ring to one worker."""
        pair = self._rank * self._size + to
        ring = self._ring(pair, reserve=True)
        sent_flag = (self._first_line + LINES * pair) * WORDS
        sync, flags, sent = self._sync, self._sync.flags, self._sent[to]
        for begin in range(0, max(message.numel(), 1), SLOT):
            if flags[sent_flag + WORDS] <= sent - SLOTS:
                sync.wait(sent_flag + WORDS, sent - SLOTS + 1, to)
            fence()
            part = message[begin : begin + SLOT]
            ring[sent % SLOTS][: part.numel()].copy_(part)
            flags[sent_flag + 1 + sent % SLOTS] = message.numel()
            fence()
            self._sent[to] = sent = sent + 1
            flags[sent_flag] = sent

    def first_sender(self) -> int:
        """Wait for a message of any worker, and return its sender. It is an error if all others are gone."""
        flags, others = self._sync.flags, [peer for peer in range(self._size) if peer != self._rank]
        sent_flags = {
            peer: (self._first_line + LINES * (peer * self._size + self._rank)) * WORDS for peer in others
        }

        def find() -> int | None:
            return next((peer for peer in others if flags[sent_flags[peer]] > self._taken[peer]), None)

        return self._sync.wait_for_any(find)

    def recv(self, message: Tensor, source: int) -> None:
        """Fill a row of bytes from the ring of one worker."""
        pair = source * self._size + self._rank
        ring = self._ring(pair)
        sent_flag = (self._first_line + LINES * pair) * WORDS
        sync, flags, taken = self._sync, self._sync.flags, self._taken[source]
        for begin in range(0, max(message.numel(), 1), SLOT):
            if flags[sent_flag] <= taken:
                sync.wait(sent_flag, taken + 1, source)
            fence()
            size = flags[sent_flag + 1 + taken % SLOTS]
            if size != message.numel():
                raise ManyhandsError(f"{sync.call}: received {size:,} bytes, expected {message.numel():,}")
            part = message[begin : begin + SLOT]
            part.copy_(ring[taken % SLOTS][: part.numel()])
            fence()
            self._taken[source] = taken = taken + 1
            flags[sent_flag + WORDS] = taken

    def _ring(self, pair: int, *, reserve: bool = False) -> list[Tensor]:
        if pair not in self._slots:
            start = self._start + pair * RING
            if reserve:
                segment.reserve(self._sync.fd, start, RING)
            self._slots[pair] = list(self._file[start : start + RING].view(SLOTS, SLOT).unbind())
        return self._slots[pair]
