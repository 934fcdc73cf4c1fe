"""Where activations of a CUDA device wait for backward: pinned host memory, reached on a stream of its own.

The side stream waits for the computing stream before it copies out, the computing stream for the side stream
before it uses what was copied back; `record_stream` keeps the allocator from handing out memory that a copy
on the other stream still reads or writes.
"""

from __future__ import annotations

import time
from collections import deque
from typing import final

import torch
from torch import Tensor

from manyhands.devices.device import Device
from manyhands.offload.activation_store import Parcel


@final
class PinnedStore:
    """Device to pinned host memory; a parcel's `source` is its copy on the host."""

    def __init__(self, on: Device) -> None:
        self.written = self.read = 0
        self.waited = 0.0
        self.in_flight = 0  # copies are queued on the device, which frees memory in the order of its work
        self.device, self._on = on.where, on
        self._side = on.side()
        self._free: dict[int, list[Tensor]] = {}  # pinning is slow: buffers are used again
        self._dropped: deque[Parcel] = deque()

    def reserve(self, nbytes: int) -> None:
        """Host memory is asked for as it is needed, and used again."""

    def send(self, source: Tensor) -> Parcel:
        """Begin to copy out."""
        self._sweep()
        computing = self._on.computing()
        parcel = Parcel(source)
        known = self._free.get(parcel.nbytes)
        host = known.pop() if known else self._on.pinned(parcel.nbytes)
        self._side.wait_stream(computing)
        with self._on.on(self._side):
            host.copy_(source, non_blocking=True)
        self._on.keep(source, self._side)
        parcel.source, parcel.state, parcel.ready = host, "away", self._side.record_event()
        self.written += parcel.nbytes
        return parcel

    def settle(self) -> None:
        """Wait until all is copied."""
        self._side.synchronize()

    def want(self, parcel: Parcel) -> None:
        """Begin to copy back."""
        parcel.wanted = True
        if parcel.state != "away":
            return
        assert parcel.source is not None
        with self._on.on(self._side):  # its own copies are in order: out before in
            buffer = torch.empty(parcel.nbytes, dtype=torch.uint8, device=self.device)
            buffer.copy_(parcel.source, non_blocking=True)
        parcel.buffer, parcel.state, parcel.ready = buffer, "here", self._side.record_event()
        self.read += parcel.nbytes

    def take(self, parcel: Parcel) -> Tensor:
        """Computing goes on when it is here; the host does not wait."""
        since = time.perf_counter()
        self.want(parcel)
        assert parcel.buffer is not None
        assert parcel.ready is not None
        computing = self._on.computing()
        computing.wait_event(parcel.ready)
        self._on.keep(parcel.buffer, computing)
        self.waited += time.perf_counter() - since
        return parcel.buffer

    def leave(self, parcel: Parcel) -> None:
        """Forget the copy on the device."""
        parcel.wanted = False
        if parcel.state == "here":
            parcel.buffer, parcel.state = None, "away"

    def drop(self, parcel: Parcel) -> None:
        """Its host memory is used again once the last copy is done."""
        parcel.dropped, parcel.buffer = True, None
        self._dropped.append(parcel)

    def close(self) -> None:
        """Give the host memory back."""
        self._side.synchronize()
        self._sweep()
        self._free.clear()

    def _sweep(self) -> None:
        for _ in range(len(self._dropped)):
            parcel = self._dropped.popleft()
            assert parcel.ready is not None
            if parcel.ready.query():
                assert parcel.source is not None
                self._free.setdefault(parcel.nbytes, []).append(parcel.source)
            else:
                self._dropped.append(parcel)
