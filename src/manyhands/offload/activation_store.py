"""Where activations wait for backward: a file on disk, with one thread that writes and one that reads.

send  ->  waiting  ->  writing  ->  away  ->  coming  ->  here        and back to away when left
             |                                             ^
             +---- wanted before it was written -----------+
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections import deque
from typing import Literal, Protocol, final

import torch
from torch import Tensor

from manyhands.core.errors import StorageError
from manyhands.devices.device import Event
from manyhands.offload.file_slots import PAGE, FileSlots, whole_pages
from manyhands.offload.scratch_file import Scratch, choose

PIECE = 4 * 2**20  # bytes that are copied to where a page begins, then written
GROWTH = 64 * 2**20  # a file grows by multiples of it
IN_FLIGHT = 64 * 2**20  # bytes that may wait to be written

State = Literal["waiting", "writing", "away", "coming", "here"]


class Parcel:
    """Bytes in the hands of a store; `buffer` is where they are while they are here."""

    __slots__ = ("buffer", "dropped", "nbytes", "ready", "slot", "source", "state", "wanted")

    def __init__(self, source: Tensor) -> None:
        self.nbytes = source.nbytes
        self.source: Tensor | None = source
        self.buffer: Tensor | None = None
        self.state: State = "waiting"
        self.slot: int | None = None
        self.wanted = self.dropped = False
        self.ready: Event | None = None  # on CUDA: when the last copy is done


class ActivationStore(Protocol):
    """What the hooks ask of a store; tensors are one-dimensional bytes."""

    device: torch.device  # that they come from
    written: int  # bytes so far
    read: int
    waited: float  # seconds that computing stood still for it
    in_flight: int  # bytes that may wait to be moved; with more, computing waits

    def reserve(self, nbytes: int) -> None:
        """Be sure to have room for so much, or say that there is none."""

    def send(self, source: Tensor) -> Parcel:
        """Begin to move these bytes away; the store lets go of them as soon as they are."""

    def settle(self) -> None:
        """Wait until all that was sent is away."""

    def want(self, parcel: Parcel) -> None:
        """Begin to fetch it."""

    def take(self, parcel: Parcel) -> Tensor:
        """The bytes, as soon as they are here."""

    def leave(self, parcel: Parcel) -> None:
        """The copy that is here is not needed any more; the one that is away stays."""

    def drop(self, parcel: Parcel) -> None:
        """Nobody will ask for it again; safe at any moment, in any thread."""

    def close(self) -> None:
        """Give everything back."""


@final
class DiskStore:
    """Main memory to disk; an error of a thread is raised where its result is asked for."""

    def __init__(self, folder: str | None = None, in_flight: int = IN_FLIGHT) -> None:
        self.device = torch.device("cpu")
        self.written = self.read = 0
        self.waited = 0.0
        self.in_flight = in_flight
        self._file = Scratch(choose(folder))
        self._slots = FileSlots()
        self._error: OSError | None = None
        self._closed = False
        self._pending = 0  # bytes that wait or are being written
        self._dropped: deque[Parcel] = deque()  # filled without the lock: a finaliser may run inside it
        self._out: deque[Parcel] = deque()
        self._in: deque[Parcel] = deque()
        lock = threading.Lock()
        self._to_write, self._to_read = threading.Condition(lock), threading.Condition(lock)
        self._done = threading.Condition(lock)
        self._threads = [
            threading.Thread(target=work, name=f"offload-{name}", daemon=True)
            for name, work in (("writer", self._write_all), ("reader", self._read_all))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def direct(self) -> bool:
        """Whether the file bypasses the page cache."""
        return self._file.direct

    @property
    def used(self) -> int:
        """Bytes of the file that belong to somebody."""
        with self._done:
            self._sweep()
            return self._slots.end - self._slots.free

    def reserve(self, nbytes: int) -> None:
        """Lay the file out for so much."""
        with self._done:
            self._file.grow(whole_pages(nbytes))

    def send(self, source: Tensor) -> Parcel:
        """Begin to write; waits while too much is waiting already."""
        parcel = Parcel(source)
        with self._done:
            self._check()
            self._sweep()
            room = whole_pages(parcel.nbytes)
            parcel.slot = self._slots.take(room)
            try:
                if self._slots.end > self._file.nbytes:
                    self._file.grow(-(-self._slots.end // GROWTH) * GROWTH)
            except BaseException:
                self._slots.give(parcel.slot, room)
                raise
            since = time.perf_counter()
            self._pending += parcel.nbytes
            self._out.append(parcel)
            self._to_write.notify()
            while self._pending > max(self.in_flight, parcel.nbytes) and self._error is None:
                self._done.wait()
            self.waited += time.perf_counter() - since
        return parcel

    def settle(self) -> None:
        """Wait until all is written."""
        with self._done:
            while self._pending:
                self._check()
                self._done.wait()

    def want(self, parcel: Parcel) -> None:
        """Begin to read; what is not written yet just stays."""
        with self._done:
            self._want(parcel)

    def take(self, parcel: Parcel) -> Tensor:
        """Wait until it is here."""
        with self._done:
            since = time.perf_counter()
            self._want(parcel)
            while parcel.state != "here":
                self._check()
                self._done.wait()
            self.waited += time.perf_counter() - since
            assert parcel.buffer is not None
            return parcel.buffer

    def leave(self, parcel: Parcel) -> None:
        """Forget the copy in memory, unless it is the only one."""
        with self._done:
            parcel.wanted = False
            if parcel.state == "here" and parcel.slot is not None:
                parcel.buffer, parcel.state = None, "away"

    def drop(self, parcel: Parcel) -> None:
        """Only noted here; whoever comes next with the lock in hand frees the slot."""
        parcel.dropped = True
        if parcel.state == "here":
            parcel.buffer = None
        self._dropped.append(parcel)

    def close(self) -> None:
        """End the threads, free the disk."""
        with self._done:
            if self._closed:
                return
            self._closed = True
            self._to_write.notify()
            self._to_read.notify()
            self._done.notify_all()
        for thread in self._threads:
            thread.join()
        self._file.close()

    def _check(self) -> None:
        if self._error is not None:
            reason = self._error.strerror or self._error
            raise StorageError(f"moved activations could not be written or read again: {reason}")
        if self._closed:
            raise StorageError("activations are asked for after the store that has them was closed")

    def _want(self, parcel: Parcel) -> None:
        self._check()
        self._sweep()
        parcel.wanted = True
        if parcel.state == "waiting":  # the writer has not come to it: it stays, and its room is free
            assert parcel.slot is not None
            self._slots.give(parcel.slot, whole_pages(parcel.nbytes))
            parcel.slot, parcel.buffer, parcel.source, parcel.state = None, parcel.source, None, "here"
            self._pending -= parcel.nbytes
        elif parcel.state == "away":
            parcel.buffer, parcel.state = aligned(parcel.nbytes), "coming"
            self._in.append(parcel)
            self._to_read.notify()

    def _sweep(self) -> None:
        """Free the slots of what was dropped; what a thread has in hand comes later."""
        later = []
        while self._dropped:
            parcel = self._dropped.popleft()
            if parcel.state in ("writing", "coming"):
                later.append(parcel)
                continue
            if parcel.state == "waiting":
                self._pending -= parcel.nbytes
            if parcel.slot is not None:
                self._slots.give(parcel.slot, whole_pages(parcel.nbytes))
            parcel.slot, parcel.source, parcel.buffer, parcel.state = None, None, None, "here"
            self._done.notify_all()
        self._dropped.extend(later)

    def _write_all(self) -> None:
        staging = mmap.mmap(-1, PIECE)
        window = ctypes.c_char.from_buffer(staging)
        address = ctypes.addressof(window)
        while (parcel := self._next(self._out, self._to_write, "waiting", "writing")) is not None:
            try:
                self._write(parcel, address)
                self._finish_write(parcel)
            except OSError as error:
                self._fail(error)
            del parcel  # it would hold what it is done with while it waits for the next
        del window
        staging.close()

    def _finish_write(self, parcel: Parcel) -> None:
        with self._done:
            self._pending -= parcel.nbytes
            self.written += parcel.nbytes
            if parcel.wanted:  # meanwhile: then it need not be read
                parcel.buffer, parcel.state = parcel.source, "here"
            else:
                parcel.state = "away"
            parcel.source = None
            self._done.notify_all()

    def _write(self, parcel: Parcel, staging: int) -> None:
        assert parcel.source is not None
        assert parcel.slot is not None
        begin = parcel.source.data_ptr()
        for offset in range(0, parcel.nbytes, PIECE):
            if parcel.dropped:
                return
            count = min(PIECE, parcel.nbytes - offset)
            ctypes.memmove(staging, begin + offset, count)
            self._file.write(staging, whole_pages(count), parcel.slot + offset)

    def _read_all(self) -> None:
        while (parcel := self._next(self._in, self._to_read, "coming", "coming")) is not None:
            try:
                buffer = parcel.buffer
                assert buffer is not None
                assert parcel.slot is not None
                self._file.read(buffer.data_ptr(), whole_pages(parcel.nbytes), parcel.slot)
                del buffer
                with self._done:
                    parcel.state = "here"
                    self.read += parcel.nbytes
                    self._done.notify_all()
            except OSError as error:
                self._fail(error)
            del parcel

    def _next(
        self, queue: deque[Parcel], bell: threading.Condition, before: State, after: State
    ) -> Parcel | None:
        """The next of a queue that is still in the state it was put there in; None when all is over."""
        with self._done:
            while True:
                self._sweep()
                while queue:
                    parcel = queue.popleft()
                    if parcel.state == before:
                        parcel.state = after
                        return parcel
                if self._closed:
                    return None
                bell.wait()

    def _fail(self, error: OSError) -> None:
        with self._done:
            self._error = error
            self._done.notify_all()


def aligned(nbytes: int) -> Tensor:
    """Bytes that begin where a page begins, with room behind them up to the next page."""
    room = torch.empty(whole_pages(nbytes) + PAGE, dtype=torch.uint8)
    return room[-room.data_ptr() % PAGE :][:nbytes]
