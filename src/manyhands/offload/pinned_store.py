"""Where activations of a CUDA device wait for backward: pinned host memory, with a stream for copies.

The side stream waits for the computing stream before it copies out. The computing stream waits for the side
stream before it uses what was copied back. `record_stream` keeps the allocator from reusing memory that a
copy on the other stream still reads or writes.
"""

from __future__ import annotations

import time
from collections import deque
from typing import final

import torch
from torch import Tensor

from manyhands.devices.device import Device
from manyhands.offload.activation_store import OffloadedBuffer


@final
class PinnedStore:
    """Moves device memory to pinned host memory. `source` of a buffer is its copy on the host."""

    def __init__(self, on: Device) -> None:
        self.written = self.read = 0
        self.waited = 0.0
        self.in_flight = (
            0  # unused: copies are queued on the device, which frees memory in the order of its work
        )
        self.device, self._on = on.where, on
        self._side = on.side()
        self._free: dict[int, list[Tensor]] = {}  # pinning is slow, so buffers are reused
        self._dropped: deque[OffloadedBuffer] = deque()

    def reserve(self, nbytes: int) -> None:
        """Do nothing: host memory is allocated when it is needed, and reused."""

    def send(self, source: Tensor) -> OffloadedBuffer:
        """Begin to copy to the host."""
        self._sweep()
        computing = self._on.computing()
        item = OffloadedBuffer(source)
        unused = self._free.get(item.nbytes)
        host = unused.pop() if unused else self._on.pinned(item.nbytes)
        self._side.wait_stream(computing)
        with self._on.on(self._side):
            host.copy_(source, non_blocking=True)
        self._on.keep(source, self._side)
        item.source, item.state, item.ready = host, "stored", self._side.record_event()
        self.written += item.nbytes
        return item

    def flush(self) -> None:
        """Wait until all is copied."""
        self._side.synchronize()

    def prefetch(self, item: OffloadedBuffer) -> None:
        """Begin to copy back."""
        item.prefetched = True
        if item.state != "stored":
            return
        assert item.source is not None
        with self._on.on(self._side):  # copies on one stream are in order: out before in
            buffer = torch.empty(item.nbytes, dtype=torch.uint8, device=self.device)
            buffer.copy_(item.source, non_blocking=True)
        item.buffer, item.state, item.ready = buffer, "loaded", self._side.record_event()
        self.read += item.nbytes

    def load(self, item: OffloadedBuffer) -> Tensor:
        """Let the computing stream wait for the copy. The host does not wait."""
        since = time.perf_counter()
        self.prefetch(item)
        assert item.buffer is not None
        assert item.ready is not None
        computing = self._on.computing()
        computing.wait_event(item.ready)
        self._on.keep(item.buffer, computing)
        self.waited += time.perf_counter() - since
        return item.buffer

    def release(self, item: OffloadedBuffer) -> None:
        """Free the copy on the device."""
        item.prefetched = False
        if item.state == "loaded":
            item.buffer, item.state = None, "stored"

    def drop(self, item: OffloadedBuffer) -> None:
        """Reuse its host memory when the last copy is done."""
        item.dropped, item.buffer = True, None
        self._dropped.append(item)

    def close(self) -> None:
        """Free the host memory."""
        self._side.synchronize()
        self._sweep()
        self._free.clear()

    def _sweep(self) -> None:
        for _ in range(len(self._dropped)):
            item = self._dropped.popleft()
            assert item.ready is not None
            if item.ready.query():
                assert item.source is not None
                self._free.setdefault(item.nbytes, []).append(item.source)
            else:
                self._dropped.append(item)
