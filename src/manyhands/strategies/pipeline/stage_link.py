"""How a stage hands a tensor to its neighbor: through slots in memory on one host, else as messages.

A slot is written once and used where it lies: the next stage computes on it and gives it back after the
backward of that micro-batch. So there are as many slots as micro-batches may be under way, the sender never
waits for the receiver to be ready, and nothing is copied but into the slot.

    counters  [ put | . . . ][ freed | . . . ]     a cache line each: the sender's, the receiver's
    slot 0    [ dtype, shape | data ... ]
    slot 1    [ dtype, shape | data ... ]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from manyhands.core.errors import DeadlineError, ManyhandsError
from manyhands.transports import tensor_bytes
from manyhands.transports.base import DEFAULT_TIMEOUT, Awaited, Transport, in_place
from manyhands.transports.waiting import fence

LINE = 64  # bytes
_HEAD = tensor_bytes.HEADER * 8
_PUT, _FREED = 0, LINE // 8


class StageLink(Protocol):
    """One direction between two stages."""

    def put(self, tensor: Tensor) -> None:
        """Hand a tensor on; it may be changed when this returns."""

    def take(self) -> Tensor:
        """The next tensor, to be used until it is given back."""

    def free(self) -> None:
        """Give the oldest taken tensor back."""


class StageRoom(NamedTuple):
    """What a link needs: slots of so many bytes."""

    slots: int
    nbytes: int

    @property
    def stride(self) -> int:
        """From one slot to the next, in bytes."""
        return _HEAD + -(-self.nbytes // LINE) * LINE

    @property
    def total(self) -> int:
        """With the counters."""
        return 2 * LINE + self.slots * self.stride


@final
class SlotLink:
    """A link through memory that both ends share."""

    def __init__(self, transport: Transport, memory: Tensor, room: StageRoom, what: Awaited) -> None:
        self._transport, self._room, self._what = transport, room, what
        self._counters = memory[: 2 * LINE].view(torch.int64).numpy()
        body = memory[2 * LINE : room.total].view(room.slots, room.stride)
        self._heads = [slot[:_HEAD].view(torch.int64).numpy() for slot in body]
        # each slot a tensor of its own: autograd counts what is written into a tensor and all its views, and
        # a slot that is written must not make another one's activations look changed
        self._data = [torch.from_numpy(slot[_HEAD : _HEAD + room.nbytes].numpy()) for slot in body]
        self._put = self._taken = self._given = 0

    def put(self, tensor: Tensor) -> None:
        """Into the next slot, as soon as that is free."""
        counters, slots = self._counters, self._room.slots
        number = self._put
        if number - counters[_FREED] >= slots:
            self._wait(lambda: bool(number - counters[_FREED] < slots), "room")
        if tensor.nbytes > self._room.nbytes:
            raise ManyhandsError(
                f"a stage hands on {tensor.nbytes:,} bytes, but {self._room.nbytes:,} were measured before "
                "the run: its outputs must not grow with the data"
            )
        head = [tensor_bytes.code(tensor.dtype), tensor.dim(), *tensor.shape]
        self._heads[number % slots][: len(head)] = head
        flat = self._data[number % slots][: tensor.nbytes].view(tensor.dtype)
        self._transport.copy_shared(tensor, flat.view(tensor.shape))
        fence()
        self._put = number + 1
        counters[_PUT] = self._put
        self._transport.notify()

    def take(self) -> Tensor:
        """Where it lies."""
        counters, number = self._counters, self._taken
        if counters[_PUT] <= number:
            self._wait(lambda: bool(counters[_PUT] > number), self._what)
        fence()
        self._taken = number + 1
        head = self._heads[number % self._room.slots]
        shape, dtype = head[2 : 2 + int(head[1])].tolist(), tensor_bytes.dtype(int(head[0]))
        nbytes = dtype.itemsize
        for length in shape:
            nbytes *= length
        in_place(self._transport, "read_shared", nbytes)
        found: Tensor = self._data[number % self._room.slots][:nbytes].view(dtype).view(shape)
        return found

    def free(self) -> None:
        """The sender may write there again."""
        self._given += 1
        fence()
        self._counters[_FREED] = self._given
        self._transport.notify()

    def _wait(self, ready: Callable[[], bool], what: Awaited) -> None:
        if not self._transport.wait_for(ready, DEFAULT_TIMEOUT, what):
            raise DeadlineError(f"waited {DEFAULT_TIMEOUT:g} s for the {what} of the neighboring stage")


@final
class MailLink:
    """A link between hosts: a message that says what comes, then what comes."""

    def __init__(self, transport: Transport, peer: int, room: StageRoom, device: torch.device) -> None:
        self._transport, self._peer, self._device = transport.messages, peer, device
        self._ahead = 2 * room.slots

    def put(self, tensor: Tensor) -> None:
        """On its way, without waiting for the receiver."""
        self._transport.send(tensor_bytes.header(tensor), self._peer, self._ahead)
        self._transport.send(tensor, self._peer, self._ahead)

    def take(self) -> Tensor:
        """Into new memory."""
        head = self._transport.recv(torch.empty(tensor_bytes.HEADER, dtype=torch.int64), self._peer)
        return self._transport.recv(tensor_bytes.allocate(head.tolist(), self._device), self._peer)

    def free(self) -> None:
        """It is the receiver's own."""


class ExpectedTensor(NamedTuple):
    """A link of the gang: from a rank to a rank, and its room."""

    source: int
    target: int
    what: Awaited
    room: StageRoom


def links(transport: Transport, wanted: list[ExpectedTensor], device: torch.device) -> list[StageLink | None]:
    """This rank's ends of the gang's links; all ranks want the same. None where it is at neither end.

    Peers on one host meet in memory, where the device can reach it; others write to each other.
    """
    peers = transport.peers_on_host if device.type == "cpu" else (transport.rank,)
    inside = [each.source in peers and each.target in peers for each in wanted]
    total = sum(each.room.total for each, near in zip(wanted, inside, strict=True) if near)
    memory = transport.on_host.share("stages", total) if total else torch.empty(0, dtype=torch.uint8)
    found: list[StageLink | None] = []
    begin = 0
    for each, near in zip(wanted, inside, strict=True):
        mine = transport.rank in (each.source, each.target)
        if near:
            region = memory[begin : begin + each.room.total]
            begin += each.room.total
            found.append(SlotLink(transport.on_host, region, each.room, each.what) if mine else None)
        elif mine:
            peer = each.target if transport.rank == each.source else each.source
            found.append(MailLink(transport, peer, each.room, device))
        else:
            found.append(None)
    return found
