"""Where activations wait for backward: a file on disk, with one thread that writes and one that reads.

send  ->  waiting  ->  writing  ->  stored  ->  loading  ->  loaded     and back to stored when released
             |                                                 ^
             +---- prefetched before it was written -----------+
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
from manyhands.offload.scratch_file import ScratchFile, choose

PIECE = 4 * 2**20  # bytes that are copied to a page boundary and then written at once
GROWTH = 64 * 2**20  # bytes: the file grows by multiples of it
IN_FLIGHT = 64 * 2**20  # bytes that may wait to be written

State = Literal["waiting", "writing", "stored", "loading", "loaded"]


class OffloadedBuffer:
    """Bytes that a store keeps. `buffer` is their memory while they are loaded."""

    __slots__ = ("buffer", "dropped", "nbytes", "prefetched", "ready", "slot", "source", "state")

    def __init__(self, source: Tensor) -> None:
        self.nbytes = source.nbytes
        self.source: Tensor | None = source
        self.buffer: Tensor | None = None
        self.state: State = "waiting"
        self.slot: int | None = None
        self.prefetched = self.dropped = False
        self.ready: Event | None = None  # on CUDA: after the last copy


class ActivationStore(Protocol):
    """The interface of a store for the hooks of autograd. Tensors are one-dimensional bytes."""

    device: torch.device  # of the tensors
    written: int  # bytes so far
    read: int
    waited: float  # seconds that the computation waited
    in_flight: int  # bytes that may wait to be moved; with more, the computation waits

    def reserve(self, nbytes: int) -> None:
        """Allocate space for `nbytes`, or raise an error."""

    def send(self, source: Tensor) -> OffloadedBuffer:
        """Begin to store these bytes. The store releases `source` when they are stored."""

    def flush(self) -> None:
        """Wait until everything that was sent is stored."""

    def prefetch(self, item: OffloadedBuffer) -> None:
        """Begin to load it."""

    def load(self, item: OffloadedBuffer) -> Tensor:
        """Wait until the bytes are loaded, and return them."""

    def release(self, item: OffloadedBuffer) -> None:
        """Free the loaded copy. The stored one stays."""

    def drop(self, item: OffloadedBuffer) -> None:
        """Free everything. It may be called at any moment, in any thread."""

    def close(self) -> None:
        """Release all resources."""


@final
class DiskStore:
    """Moves main memory to disk. An error of a thread is raised when its result is needed."""

    def __init__(self, folder: str | None = None, in_flight: int = IN_FLIGHT) -> None:
        self.device = torch.device("cpu")
        self.written = self.read = 0
        self.waited = 0.0
        self.in_flight = in_flight
        self._file = ScratchFile(choose(folder))
        self._slots = FileSlots()
        self._error: OSError | None = None
        self._closed = False
        self._pending = 0  # bytes that are waiting or writing
        self._dropped: deque[OffloadedBuffer] = (
            deque()
        )  # filled without the lock: a finalizer may run while it is held
        self._out: deque[OffloadedBuffer] = deque()
        self._in: deque[OffloadedBuffer] = deque()
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
        """Bytes of the file that are in use."""
        with self._done:
            self._sweep()
            return self._slots.end - self._slots.free

    def reserve(self, nbytes: int) -> None:
        """Grow the file to `nbytes`."""
        with self._done:
            self._file.grow(whole_pages(nbytes))

    def send(self, source: Tensor) -> OffloadedBuffer:
        """Begin to write. Wait while more than `in_flight` bytes are waiting."""
        item = OffloadedBuffer(source)
        with self._done:
            self._check()
            self._sweep()
            size = whole_pages(item.nbytes)
            item.slot = self._slots.take(size)
            try:
                if self._slots.end > self._file.nbytes:
                    self._file.grow(-(-self._slots.end // GROWTH) * GROWTH)
            except BaseException:
                self._slots.give(item.slot, size)
                raise
            since = time.perf_counter()
            self._pending += item.nbytes
            self._out.append(item)
            self._to_write.notify()
            while self._pending > max(self.in_flight, item.nbytes) and self._error is None:
                self._done.wait()
            self.waited += time.perf_counter() - since
        return item

    def flush(self) -> None:
        """Wait until all is written."""
        with self._done:
            while self._pending:
                self._check()
                self._done.wait()

    def prefetch(self, item: OffloadedBuffer) -> None:
        """Begin to read. What is not written yet stays in memory."""
        with self._done:
            self._prefetch(item)

    def load(self, item: OffloadedBuffer) -> Tensor:
        """Wait until it is loaded."""
        with self._done:
            since = time.perf_counter()
            self._prefetch(item)
            while item.state != "loaded":
                self._check()
                self._done.wait()
            self.waited += time.perf_counter() - since
            assert item.buffer is not None
            return item.buffer

    def release(self, item: OffloadedBuffer) -> None:
        """Free the copy in memory, unless it is the only one."""
        with self._done:
            item.prefetched = False
            if item.state == "loaded" and item.slot is not None:
                item.buffer, item.state = None, "stored"

    def drop(self, item: OffloadedBuffer) -> None:
        """Only mark it. The next call that holds the lock frees the slot."""
        item.dropped = True
        if item.state == "loaded":
            item.buffer = None
        self._dropped.append(item)

    def close(self) -> None:
        """End the threads and free the disk."""
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
            raise StorageError(f"offloaded activations could not be written or read: {reason}")
        if self._closed:
            raise StorageError("offloaded activations are needed after their store was closed")

    def _prefetch(self, item: OffloadedBuffer) -> None:
        self._check()
        self._sweep()
        item.prefetched = True
        if item.state == "waiting":  # not written yet: it stays in memory, and its slot is freed
            assert item.slot is not None
            self._slots.give(item.slot, whole_pages(item.nbytes))
            item.slot, item.buffer, item.source, item.state = None, item.source, None, "loaded"
            self._pending -= item.nbytes
        elif item.state == "stored":
            item.buffer, item.state = aligned(item.nbytes), "loading"
            self._in.append(item)
            self._to_read.notify()

    def _sweep(self) -> None:
        """Free the slots of what was dropped. What a thread uses right now is freed later."""
        later = []
        while self._dropped:
            item = self._dropped.popleft()
            if item.state in ("writing", "loading"):
                later.append(item)
                continue
            if item.state == "waiting":
                self._pending -= item.nbytes
            if item.slot is not None:
                self._slots.give(item.slot, whole_pages(item.nbytes))
            item.slot, item.source, item.buffer, item.state = None, None, None, "loaded"
            self._done.notify_all()
        self._dropped.extend(later)

    def _write_all(self) -> None:
        staging = mmap.mmap(-1, PIECE)
        start = ctypes.c_char.from_buffer(staging)
        address = ctypes.addressof(start)
        while (item := self._next(self._out, self._to_write, "waiting", "writing")) is not None:
            try:
                self._write(item, address)
                self._finish_write(item)
            except OSError as error:
                self._fail(error)
            del item  # otherwise it would hold the memory while it waits for the next
        del start
        staging.close()

    def _finish_write(self, item: OffloadedBuffer) -> None:
        with self._done:
            self._pending -= item.nbytes
            self.written += item.nbytes
            if item.prefetched:  # prefetched meanwhile: it stays in memory
                item.buffer, item.state = item.source, "loaded"
            else:
                item.state = "stored"
            item.source = None
            self._done.notify_all()

    def _write(self, item: OffloadedBuffer, staging: int) -> None:
        assert item.source is not None
        assert item.slot is not None
        begin = item.source.data_ptr()
        for offset in range(0, item.nbytes, PIECE):
            if item.dropped:
                return
            count = min(PIECE, item.nbytes - offset)
            ctypes.memmove(staging, begin + offset, count)
            self._file.write(staging, whole_pages(count), item.slot + offset)

    def _read_all(self) -> None:
        while (item := self._next(self._in, self._to_read, "loading", "loading")) is not None:
            try:
                buffer = item.buffer
                assert buffer is not None
                assert item.slot is not None
                self._file.read(buffer.data_ptr(), whole_pages(item.nbytes), item.slot)
                del buffer
                with self._done:
                    item.state = "loaded"
                    self.read += item.nbytes
                    self._done.notify_all()
            except OSError as error:
                self._fail(error)
            del item

    def _next(
        self, queue: deque[OffloadedBuffer], added: threading.Condition, before: State, after: State
    ) -> OffloadedBuffer | None:
        """The next of a queue that is still in the state `before`, or None when the store is closed."""
        with self._done:
            while True:
                self._sweep()
                while queue:
                    item = queue.popleft()
                    if item.state == before:
                        item.state = after
                        return item
                if self._closed:
                    return None
                added.wait()

    def _fail(self, error: OSError) -> None:
        with self._done:
            self._error = error
            self._done.notify_all()


def aligned(nbytes: int) -> Tensor:
    """Bytes that begin at a page boundary and can be read up to the next one."""
    memory = torch.empty(whole_pages(nbytes) + PAGE, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE :][:nbytes]
