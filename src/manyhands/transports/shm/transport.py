"""Workers of one host, who meet and exchange tensors in shared memory.

    file   [ flags | mailboxes' flags | staging 0 | staging 1 | rings of the mailboxes ... ]
    staging, for each worker   [ header | slot ]

A collective copies into this worker's slot, meets the others, and reads theirs. Two stagings are used in
turn: whoever writes into one again has met the others since they read it, so no meeting is needed for that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import final

import torch
from torch import Tensor

from manyhands.core.errors import UsageError
from manyhands.core.rank_info import RankInfo
from manyhands.transports import tensor_bytes
from manyhands.transports.base import CPU, PATIENCE, Awaited, Transport
from manyhands.transports.shm import mailbox, segment, sync_flags
from manyhands.transports.shm.sync_flags import LINE
from manyhands.transports.solo import SoloTransport

SLOT = 2**20  # bytes of a worker's part in a staging: few enough for the caches, many enough for a meeting
STAGING = 2**24  # bytes of all workers' parts at most: a container's shared memory may be all of 64 MB
SMALL = 2**16  # bytes up to which summing everything oneself is faster than meeting once more
PAGE = 4096


@final
class ShmTransport:
    """The workers of one host of a gang. Where there are several hosts, ranks are counted on this one."""

    def __init__(self, info: RankInfo, *, device: torch.device = CPU, timeout: float = PATIENCE) -> None:
        names = info.peers_on_host
        self.rank, self.size = info.local_rank, len(names)
        self.peers_on_host: tuple[int, ...] = tuple(range(self.size))
        self._closed = False
        lines = self.size + mailbox.LINES * self.size**2 + 1  # the last is the bell's
        head = _pages(lines * LINE)
        slot = max(PAGE, min(SLOT, STAGING // self.size) // PAGE * PAGE)
        stride = PAGE + slot  # a header has a page of its own, so that slots begin on one
        rings = head + 2 * self.size * stride
        self._line, self._joining = info.channel, info.joining
        self._kept: list[int] = []  # files of shared memory, for those who join later
        if info.joining:
            fd, mapped = segment.attach(info.channel.posted["shm control"])
            sync_flags.claim(fd, self.rank)
        else:
            fd, mapped = segment.together(
                lambda text: [info.channel.exchange(text)[name] for name in names],
                self.rank == 0,
                "control",
                rings + self.size**2 * mailbox.RING,
                reserved=rings,
                opened=partial(sync_flags.claim, rank=self.rank),
            )
            self._post("control", fd)
        file = torch.frombuffer(mapped, dtype=torch.uint8)
        self._control = sync_flags.SyncFlags(fd, mapped, lines * LINE, self.rank, names, timeout)
        self._mail = mailbox.Mailboxes(self._control, self.size, file, rings, self.rank, self.size)
        staged = file[head:rings].view(2, self.size, stride)
        self._headers = staged[:, :, : tensor_bytes.HEADER * 8].view(torch.int64)
        self._slots = {torch.uint8: [list(half.unbind()) for half in staged[:, :, PAGE:].unbind()]}
        self._capacity, self._turn = slot, 0

    @property
    def on_host(self) -> ShmTransport:
        """All of it."""
        return self

    @property
    def across(self) -> SoloTransport:
        """There is one host."""
        return SoloTransport()

    @property
    def messages(self) -> ShmTransport:
        """Itself."""
        return self

    def parts(self, groups: Sequence[tuple[int, ...]]) -> Transport:
        """Refused: those who share memory need no messages among some of them."""
        raise UsageError("transport shm cannot be divided into groups of workers: use torch or mpi")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum in rank order; each worker its slice, or all of it where that is faster."""
        self._control.begin("all_reduce")
        if self.size == 1:
            return tensor
        whole = tensor_bytes.row(tensor)
        length = self._capacity // whole.element_size()
        if whole.numel() * whole.element_size() <= SMALL:
            self._sum_small(whole)
        else:
            for begin in range(0, whole.numel(), length):
                self._sum_slices(whole[begin : begin + length])
        return tensor_bytes.back(whole, tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """The root writes, all others read."""
        self._control.begin("broadcast")
        whole = tensor_bytes.row(tensor)
        message = tensor_bytes.as_bytes(whole)
        for begin in range(0, max(message.numel(), 1), self._capacity):
            part = message[begin : begin + self._capacity]
            slot = self._next(torch.uint8)[root][: part.numel()]
            if self.rank == root:
                slot.copy_(part)
            self._control.meet()
            if self.rank != root:
                part.copy_(slot)
        return tensor if self.rank == root else tensor_bytes.back(whole, tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Everyone writes, everyone reads, as often as the longest one needs."""
        self._control.begin("all_gather")
        return [part.to(tensor.device) for part in self._gather(tensor)]

    def send(self, tensor: Tensor, to: int, ahead: int = 0) -> None:
        """Through the ring of this pair; returns when it is in there, however large it is."""
        self._control.begin("send")
        self._mail.send(tensor_bytes.as_bytes(tensor_bytes.row(tensor)), to)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """Out of the ring of this pair."""
        self._control.begin("recv")
        whole = tensor_bytes.row(tensor)
        self._mail.recv(tensor_bytes.as_bytes(whole), source)
        return tensor_bytes.back(whole, tensor)

    def recv_any(self, tensor: Tensor) -> int:
        """Out of the first ring that has anything."""
        self._control.begin("recv_any")
        source = self._mail.first()
        self.recv(tensor, source)
        return source

    def barrier(self) -> None:
        """A flag each."""
        self._control.begin("barrier")
        self._control.meet()

    def share(self, name: str, nbytes: int) -> Tensor:
        """A file of their own, which has lost its name by the time this returns.

        Who joins later finds it through the first worker, who keeps it open; so it asks nobody.
        """
        self._control.begin("share")
        if nbytes == 0:
            return torch.zeros(0, dtype=torch.uint8)  # nothing cannot be mapped
        if self._joining:
            fd, mapped = segment.attach(self._line.posted[f"shm {name}"])
        else:
            what = "".join(letter if letter.isalnum() else "_" for letter in name) or "memory"
            fd, mapped = segment.together(self._tell, self.rank == 0, what, nbytes)
            self._post(name, fd)
        if self.rank == 0:
            self._kept.append(fd)
        else:
            os.close(fd)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def exclusive(self, number: int = 0) -> AbstractContextManager[object]:
        """A lock on a byte of the file."""
        return self._control.exclusive(number)

    def until(self, ready: Callable[[], bool], seconds: float, what: Awaited = "work") -> bool:
        """Work may be there without a word; an answer and a request come with the bell."""
        self._control.begin(what)
        if what in ("answer", "request", "activation", "gradient"):
            return self._control.bell.until(ready, seconds)
        return self._control.until(ready, seconds)

    def ring(self) -> None:
        """The host's bell."""
        self._control.bell.ring()

    def copy_shared(self, tensor: Tensor, out: Tensor) -> Tensor:
        """A copy."""
        return out.copy_(tensor)

    def add_shared(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        """Summed where they lie."""
        return tensor_bytes.add_in_order(parts, out)

    def close(self) -> None:
        """Let go of the flags; shared tensors stay as long as someone holds them."""
        if not self._closed:
            self._closed = True
            self._control.close()
            for fd in self._kept:
                os.close(fd)
            self._slots.clear()
            del self._mail, self._headers

    def _post(self, name: str, fd: int) -> None:
        if self.rank == 0:
            self._line.post(f"shm {name}", f"/proc/{os.getpid()}/fd/{fd}")

    def _next(self, dtype: torch.dtype) -> list[Tensor]:
        """The slots of the staging whose turn it is, by rank."""
        self._turn ^= 1
        if dtype not in self._slots:
            self._slots[dtype] = [[slot.view(dtype) for slot in half] for half in self._slots[torch.uint8]]
        return self._slots[dtype][self._turn]

    def _sum_small(self, whole: Tensor) -> None:
        length = whole.numel()
        parts = [slot[:length] for slot in self._next(whole.dtype)]
        parts[self.rank].copy_(whole)
        self._control.meet()
        tensor_bytes.add_in_order(parts, whole)

    def _sum_slices(self, whole: Tensor) -> None:
        """Each worker sums its slice of all, into the part of its own slot that nobody else needs."""
        slots, mine = self._next(whole.dtype), self.rank
        slices = tensor_bytes.cut(whole.numel(), self.size)
        for rank, part in enumerate(slices):
            if rank != mine:
                slots[mine][part].copy_(whole[part])
        self._control.meet()
        own = slices[mine]
        parts = [slot[own] for slot in slots]
        parts[mine] = whole[own]
        tensor_bytes.add_in_order(parts, slots[mine][own])
        whole[own].copy_(slots[mine][own])
        self._control.meet()
        for rank, part in enumerate(slices):
            if rank != mine:
                whole[part].copy_(slots[rank][part])

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        message = tensor_bytes.as_bytes(tensor_bytes.row(tensor))
        capacity, mine = self._capacity, self.rank
        self._headers[self._turn ^ 1, mine].copy_(tensor_bytes.header(tensor))
        rooms: list[Tensor] = []
        rows: list[Tensor] = []
        begin = longest = 0
        while begin <= longest:
            slots = self._next(torch.uint8)
            part = message[begin : begin + capacity]
            slots[mine][: part.numel()].copy_(part)
            self._control.meet()
            if not rooms:
                rooms = [tensor_bytes.room(numbers) for numbers in self._headers[self._turn].tolist()]
                rows = [tensor_bytes.as_bytes(room.view(-1)) for room in rooms]
                longest = max(row.numel() for row in rows) - 1
            for row, slot in zip(rows, slots, strict=True):
                part = row[begin : begin + capacity]
                part.copy_(slot[: part.numel()])
            begin += capacity
        return rooms

    def _tell(self, text: str) -> list[str]:
        letters = torch.tensor(list(text.encode()), dtype=torch.uint8)
        return [bytes(told.tolist()).decode() for told in self._gather(letters)]


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
