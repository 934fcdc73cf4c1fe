"""Messages between two workers of one host: a ring of slots in shared memory for each ordered pair.

    sender's line    [ sent  | size | size | size | size ]     how many parts were put in, and the size of
    receiver's line  [ taken | unused ...                ]     the whole message that each slot's is a part of
    ring             [ slot 0 | slot 1 | slot 2 | slot 3 ]     part p lies in slot p mod 4

A send returns when its last part is in the ring: small messages wait for nobody, large ones stream through.
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
LINES = 2  # of flags, a pair


@final
class Mailboxes:
    """All rings of a host, as one worker uses them; a ring takes its memory at the first message."""

    def __init__(
        self, control: SyncFlags, first_line: int, file: Tensor, start: int, rank: int, size: int
    ) -> None:
        self._control, self._first_line, self._file, self._start = control, first_line, file, start
        self._rank, self._size = rank, size
        self._sent, self._taken = [0] * size, [0] * size
        self._slots: dict[int, list[Tensor]] = {}

    def send(self, message: Tensor, to: int) -> None:
        """Put a row of bytes into the ring to one worker."""
        pair = self._rank * self._size + to
        ring = self._ring(pair, reserve=True)
        sent_flag = (self._first_line + LINES * pair) * WORDS
        control, flags, sent = self._control, self._control.flags, self._sent[to]
        for begin in range(0, max(message.numel(), 1), SLOT):
            if flags[sent_flag + WORDS] <= sent - SLOTS:
                control.wait(sent_flag + WORDS, sent - SLOTS + 1, to)
            fence()
            part = message[begin : begin + SLOT]
            ring[sent % SLOTS][: part.numel()].copy_(part)
            flags[sent_flag + 1 + sent % SLOTS] = message.numel()
            fence()
            self._sent[to] = sent = sent + 1
            flags[sent_flag] = sent

    def first(self) -> int:
        """The worker whose message is there, when there is one; all of them gone is an error."""
        flags, others = self._control.flags, [peer for peer in range(self._size) if peer != self._rank]
        lines = {
            peer: (self._first_line + LINES * (peer * self._size + self._rank)) * WORDS for peer in others
        }

        def found() -> int | None:
            return next((peer for peer in others if flags[lines[peer]] > self._taken[peer]), None)

        return self._control.first(found)

    def recv(self, message: Tensor, source: int) -> None:
        """Fill a row of bytes from the ring of one worker."""
        pair = source * self._size + self._rank
        ring = self._ring(pair)
        sent_flag = (self._first_line + LINES * pair) * WORDS
        control, flags, taken = self._control, self._control.flags, self._taken[source]
        for begin in range(0, max(message.numel(), 1), SLOT):
            if flags[sent_flag] <= taken:
                control.wait(sent_flag, taken + 1, source)
            fence()
            size = flags[sent_flag + 1 + taken % SLOTS]
            if size != message.numel():
                raise ManyhandsError(
                    f"{control.said}: {size:,} bytes came where {message.numel():,} were expected"
                )
            part = message[begin : begin + SLOT]
            part.copy_(ring[taken % SLOTS][: part.numel()])
            fence()
            self._taken[source] = taken = taken + 1
            flags[sent_flag + WORDS] = taken

    def _ring(self, pair: int, *, reserve: bool = False) -> list[Tensor]:
        if pair not in self._slots:
            start = self._start + pair * RING
            if reserve:
                segment.reserve(self._control.fd, start, RING)
            self._slots[pair] = list(self._file[start : start + RING].view(SLOTS, SLOT).unbind())
        return self._slots[pair]
