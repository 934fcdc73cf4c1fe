"""Workers of one host that synchronize and exchange tensors in shared memory.

    file   [ flags | flags of the mailboxes | staging 0 | staging 1 | rings of the mailboxes ... ]
    staging, for each worker   [ header | slot ]

A collective copies into this worker's slot, waits at a barrier, and reads the slots of the others. It uses
the two stagings in turn. A worker that writes into one again has passed a barrier since the others read it,
so no second barrier is needed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, Self, final

import torch
from torch import Tensor

from manyhands.core.rank_info import ControlChannel, NullChannel, RankInfo
from manyhands.transports import rank_grid, tensor_bytes
from manyhands.transports.base import CPU, DEFAULT_TIMEOUT, Awaited, Transport
from manyhands.transports.shm import mailbox, segment, sync_flags
from manyhands.transports.shm.sync_flags import LINE
from manyhands.transports.solo import SoloTransport
from manyhands.transports.transport_defaults import TransportDefaults

SLOT = 2**20  # bytes per worker of a staging: small enough for the caches, large enough for few barriers
STAGING = 2**24  # bytes of all slots of a staging at most: a container may have only 64 MB of shared memory
SMALL = 2**16  # bytes up to which it is faster to sum everything in each worker than to wait once more
PAGE = 4096


class _FileLayout(NamedTuple):
    """Offsets and sizes in the file of a group, in bytes."""

    flags: int
    stagings: int  # offset
    slot: int
    stride: int  # from one worker's part of a staging to the next
    rings: int  # offset
    total: int

    @classmethod
    def of(cls, size: int) -> _FileLayout:
        flags = (size + mailbox.LINES * size**2 + 1) * LINE  # the last line is the event's
        stagings = -(-flags // PAGE) * PAGE
        slot = max(PAGE, min(SLOT, STAGING // size) // PAGE * PAGE)
        stride = PAGE + slot  # a header has a page of its own, so that slots begin on one
        rings = stagings + 2 * size * stride
        return cls(flags, stagings, slot, stride, rings, rings + size**2 * mailbox.RING)


@final
class ShmTransport(TransportDefaults):
    """The workers of one host. With several hosts, `rank` is the local rank on this one."""

    def __init__(
        self, info: RankInfo, *, device: torch.device = CPU, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        ranks = info.peers_on_host
        self._begin(info.local_rank, ranks, timeout, info.channel, joining=info.joining)
        if info.joining:
            fd, mapped = segment.attach(info.channel.posted["shm control"])
            sync_flags.hold_alive_lock(fd, self.rank)
            self._open(fd, mapped)
        else:
            self._create("control", lambda text: [info.channel.exchange(text)[rank] for rank in ranks])

    def _begin(
        self,
        rank: int,
        group_ranks: tuple[int, ...],
        timeout: float,
        channel: ControlChannel,
        *,
        joining: bool,
    ) -> None:
        self.rank, self.size = rank, len(group_ranks)
        self.peers_on_host: tuple[int, ...] = tuple(range(self.size))
        self._group_ranks, self._timeout = group_ranks, timeout
        self._channel, self._joining = channel, joining
        self._open_files: list[int] = []  # of shared memory, for workers that join later
        self._parts: list[Self] = []  # of groups
        self._closed = False

    def _create(self, name: str, exchange: segment.Exchange) -> None:
        layout = _FileLayout.of(self.size)
        fd, mapped = segment.create_together(
            exchange,
            self.rank == 0,
            name,
            layout.total,
            reserved=layout.rings,
            opened=partial(sync_flags.hold_alive_lock, rank=self.rank),
        )
        self._post(name, fd)
        self._open(fd, mapped)

    def _open(self, fd: int, mapped: mmap.mmap) -> None:
        layout = _FileLayout.of(self.size)
        file = torch.frombuffer(mapped, dtype=torch.uint8)
        self._sync = sync_flags.SyncFlags(
            fd, mapped, layout.flags, self.rank, self._group_ranks, self._timeout
        )
        self._mail = mailbox.Mailboxes(self._sync, self.size, file, layout.rings, self.rank, self.size)
        staged = file[layout.stagings : layout.rings].view(2, self.size, layout.stride)
        self._headers = staged[:, :, : tensor_bytes.HEADER * 8].view(torch.int64)
        self._slots = {torch.uint8: [list(half.unbind()) for half in staged[:, :, PAGE:].unbind()]}
        self._capacity, self._turn = layout.slot, 0

    @property
    def on_host(self) -> Self:
        return self

    @property
    def across(self) -> Transport:
        return SoloTransport()

    def split(self, groups: Sequence[tuple[int, ...]]) -> Transport:
        """Each group has a file of its own. If one group fails to create it, all fail."""
        self._sync.begin("split")
        mine = rank_grid.group_of(self.rank, groups)
        order = (*mine, *(rank for rank in range(self.size) if rank not in mine))

        def exchange(text: str) -> list[str]:
            texts = self._exchange(text)
            return [texts[rank] for rank in order]

        part = type(self).__new__(type(self))
        ranks = tuple(self._group_ranks[rank] for rank in mine)
        part._begin(mine.index(self.rank), ranks, self._timeout, NullChannel(), joining=False)
        part._create("group", exchange)
        self._parts.append(part)
        return part

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum in rank order. Each worker sums its slice, or everything if that is faster."""
        self._sync.begin("all_reduce")
        if self.size == 1:
            return tensor
        whole = tensor_bytes.flatten(tensor)
        length = self._capacity // whole.element_size()
        if whole.numel() * whole.element_size() <= SMALL:
            self._sum_small(whole)
        else:
            for begin in range(0, whole.numel(), length):
                self._sum_slices(whole[begin : begin + length])
        return tensor_bytes.copy_back(whole, tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        self._sync.begin("broadcast")
        whole = tensor_bytes.flatten(tensor)
        message = tensor_bytes.as_bytes(whole)
        for begin in range(0, max(message.numel(), 1), self._capacity):
            part = message[begin : begin + self._capacity]
            slot = self._next(torch.uint8)[root][: part.numel()]
            if self.rank == root:
                slot.copy_(part)
            self._sync.barrier()
            if self.rank != root:
                part.copy_(slot)
        return tensor if self.rank == root else tensor_bytes.copy_back(whole, tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """All write and all read, as often as the longest tensor needs."""
        self._sync.begin("all_gather")
        return [part.to(tensor.device) for part in self._gather(tensor)]

    def send(self, tensor: Tensor, to: int, ahead: int = 0) -> None:
        """Write into the ring of this pair, whatever `ahead` is."""
        self._sync.begin("send")
        self._mail.send(tensor_bytes.as_bytes(tensor_bytes.flatten(tensor)), to)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        self._sync.begin("recv")
        whole = tensor_bytes.flatten(tensor)
        self._mail.recv(tensor_bytes.as_bytes(whole), source)
        return tensor_bytes.copy_back(whole, tensor)

    def recv_any(self, tensor: Tensor) -> int:
        self._sync.begin("recv_any")
        source = self._mail.first_sender()
        self.recv(tensor, source)
        return source

    def barrier(self) -> None:
        self._sync.begin("barrier")
        self._sync.barrier()

    def share(self, name: str, nbytes: int) -> Tensor:
        """Map a file that has no name any more when this returns.

        A worker that joins later finds it through the first worker, which keeps it open.
        """
        self._sync.begin("share")
        if nbytes == 0:
            return torch.zeros(0, dtype=torch.uint8)  # an empty file cannot be mapped
        if self._joining:
            fd, mapped = segment.attach(self._channel.posted[f"shm {name}"])
        else:
            label = "".join(letter if letter.isalnum() else "_" for letter in name) or "memory"
            fd, mapped = segment.create_together(self._exchange, self.rank == 0, label, nbytes)
            self._post(name, fd)
        if self.rank == 0:
            self._open_files.append(fd)
        else:
            os.close(fd)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def lock(self, number: int = 0) -> AbstractContextManager[object]:
        return self._sync.lock(number)

    def wait_for(self, ready: Callable[[], bool], seconds: float, what: Awaited = "work") -> bool:
        """Poll for work, which may come without a notification. Sleep until notified for all else."""
        self._sync.begin(what)
        if what in ("answer", "request", "activation", "gradient"):
            return self._sync.event.wait_for(ready, seconds)
        return self._sync.poll(ready, seconds)

    def notify(self) -> None:
        self._sync.event.notify()

    def close(self) -> None:
        """Release the flags. Shared tensors stay as long as they are referenced."""
        if not self._closed:
            self._closed = True
            for part in self._parts:
                part.close()
            self._sync.close()
            for fd in self._open_files:
                os.close(fd)
            self._slots.clear()
            del self._mail, self._headers

    def _post(self, name: str, fd: int) -> None:
        if self.rank == 0:
            self._channel.post(f"shm {name}", f"/proc/{os.getpid()}/fd/{fd}")

    def _next(self, dtype: torch.dtype) -> list[Tensor]:
        """The slots of the next staging, by rank."""
        self._turn ^= 1
        if dtype not in self._slots:
            self._slots[dtype] = [[slot.view(dtype) for slot in half] for half in self._slots[torch.uint8]]
        return self._slots[dtype][self._turn]

    def _sum_small(self, whole: Tensor) -> None:
        length = whole.numel()
        parts = [slot[:length] for slot in self._next(whole.dtype)]
        parts[self.rank].copy_(whole)
        self._sync.barrier()
        tensor_bytes.add_in_order(parts, whole)

    def _sum_slices(self, whole: Tensor) -> None:
        """Each worker sums its slice into the part of its own slot that no other worker reads before."""
        slots, mine = self._next(whole.dtype), self.rank
        slices = tensor_bytes.slices(whole.numel(), self.size)
        for rank, part in enumerate(slices):
            if rank != mine:
                slots[mine][part].copy_(whole[part])
        self._sync.barrier()
        own = slices[mine]
        parts = [slot[own] for slot in slots]
        parts[mine] = whole[own]
        tensor_bytes.add_in_order(parts, slots[mine][own])
        whole[own].copy_(slots[mine][own])
        self._sync.barrier()
        for rank, part in enumerate(slices):
            if rank != mine:
                whole[part].copy_(slots[rank][part])

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        message = tensor_bytes.as_bytes(tensor_bytes.flatten(tensor))
        capacity, mine = self._capacity, self.rank
        self._headers[self._turn ^ 1, mine].copy_(tensor_bytes.header(tensor))
        gathered: list[Tensor] = []
        rows: list[Tensor] = []
        begin = longest = 0
        while begin <= longest:
            slots = self._next(torch.uint8)
            part = message[begin : begin + capacity]
            slots[mine][: part.numel()].copy_(part)
            self._sync.barrier()
            if not gathered:
                gathered = [tensor_bytes.allocate(header) for header in self._headers[self._turn].tolist()]
                rows = [tensor_bytes.as_bytes(each.view(-1)) for each in gathered]
                longest = max(row.numel() for row in rows) - 1
            for row, slot in zip(rows, slots, strict=True):
                part = row[begin : begin + capacity]
                part.copy_(slot[: part.numel()])
            begin += capacity
        return gathered

    def _exchange(self, text: str) -> list[str]:
        encoded = torch.tensor(list(text.encode()), dtype=torch.uint8)
        return [bytes(row.tolist()).decode() for row in self._gather(encoded)]
