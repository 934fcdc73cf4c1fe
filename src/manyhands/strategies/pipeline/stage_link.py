"""How a stage sends a tensor to its neighbor: through slots in memory on one host, else as messages.

A slot is written once and used in place: the next stage computes on it and releases it after the backward
pass of that micro-batch. There are as many slots as micro-batches may be in flight, so the sender never waits
for the receiver, and the only copy is the one into the slot.

    counters  [ sent | . . . ][ released | . . . ]     one cache line each: the sender's, the receiver's
    slot 0    [ dtype, shape | data ... ]
    slot 1    [ dtype, shape | data ... ]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from manyhands.core.errors import DeadlineError, ManyhandsError
from manyhands.data import trees
from manyhands.data.trees import Structure, Tree
from manyhands.transports import tensor_bytes
from manyhands.transports.base import DEFAULT_TIMEOUT, Awaited, Transport, in_place
from manyhands.transports.waiting import fence

CACHE_LINE = 64  # bytes
_HEAD = tensor_bytes.HEADER * 8
_SENT, _RELEASED = 0, CACHE_LINE // 8


class StageLink(Protocol):
    """One direction between two stages."""

    def put(self, tensor: Tensor) -> None:
        """Send a tensor; it may be changed when this returns."""

    def take(self) -> Tensor:
        """Receive the next tensor, to be used until it is released."""

    def release(self) -> None:
        """Release the oldest tensor that was taken."""


class LinkSize(NamedTuple):
    """The memory that a link needs."""

    slots: int
    nbytes: int  # of the largest tensor

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return _HEAD + -(-self.nbytes // CACHE_LINE) * CACHE_LINE

    @property
    def total(self) -> int:
        """Bytes of all slots and the counters."""
        return 2 * CACHE_LINE + self.slots * self.stride


@final
class SlotLink:
    """A link through memory that both stages share."""

    def __init__(self, transport: Transport, memory: Tensor, size: LinkSize, what: Awaited) -> None:
        self._transport, self._size, self._what = transport, size, what
        self._counters = memory[: 2 * CACHE_LINE].view(torch.int64).numpy()
        body = memory[2 * CACHE_LINE : size.total].view(size.slots, size.stride)
        self._heads = [slot[:_HEAD].view(torch.int64).numpy() for slot in body]
        # each slot is a tensor of its own: autograd counts writes to a tensor and all its views, and a write
        # to one slot must not make the activations in another look changed
        self._data = [torch.from_numpy(slot[_HEAD : _HEAD + size.nbytes].numpy()) for slot in body]
        self._sent = self._taken = self._released = 0

    def put(self, tensor: Tensor) -> None:
        """Write into the next slot, as soon as it is released."""
        counters, slots = self._counters, self._size.slots
        number = self._sent
        if number - counters[_RELEASED] >= slots:
            self._wait(lambda: bool(number - counters[_RELEASED] < slots), "room")
        if tensor.nbytes > self._size.nbytes:
            raise ManyhandsError(
                f"a stage sends {tensor.nbytes:,} bytes, but {self._size.nbytes:,} were measured before "
                "the run: pad all batches to one length, or use --transport torch, which sends any size"
            )
        head = [tensor_bytes.code(tensor.dtype), tensor.dim(), *tensor.shape]
        self._heads[number % slots][: len(head)] = head
        flat = self._data[number % slots][: tensor.nbytes].view(tensor.dtype)
        self._transport.copy_shared(tensor, flat.view(tensor.shape))
        fence()
        self._sent = number + 1
        counters[_SENT] = self._sent
        self._transport.notify()

    def take(self) -> Tensor:
        """Return the slot itself, not a copy."""
        counters, number = self._counters, self._taken
        if counters[_SENT] <= number:
            self._wait(lambda: bool(counters[_SENT] > number), self._what)
        fence()
        self._taken = number + 1
        head = self._heads[number % self._size.slots]
        shape, dtype = head[2 : 2 + int(head[1])].tolist(), tensor_bytes.dtype(int(head[0]))
        nbytes = dtype.itemsize
        for length in shape:
            nbytes *= length
        in_place(self._transport, "read_shared", nbytes)
        found: Tensor = self._data[number % self._size.slots][:nbytes].view(dtype).view(shape)
        return found

    def release(self) -> None:
        """Let the sender write to the slot again."""
        self._released += 1
        fence()
        self._counters[_RELEASED] = self._released
        self._transport.notify()

    def _wait(self, ready: Callable[[], bool], what: Awaited) -> None:
        if not self._transport.wait_for(ready, DEFAULT_TIMEOUT, what):
            raise DeadlineError(f"waited {DEFAULT_TIMEOUT:g} s for the {what} of the neighboring stage")


@final
class MessageLink:
    """A link between hosts: a message with dtype and shape, then the tensor."""

    def __init__(self, transport: Transport, peer: int, size: LinkSize, device: torch.device) -> None:
        self._transport, self._peer, self._device = transport.messages, peer, device
        self._ahead = 2 * size.slots

    def put(self, tensor: Tensor) -> None:
        """Send without waiting for the receiver."""
        self._transport.send(tensor_bytes.header(tensor), self._peer, self._ahead)
        self._transport.send(tensor, self._peer, self._ahead)

    def take(self) -> Tensor:
        """Receive into new memory."""
        head = self._transport.recv(torch.empty(tensor_bytes.HEADER, dtype=torch.int64), self._peer)
        return self._transport.recv(tensor_bytes.allocate(head.tolist(), self._device), self._peer)

    def release(self) -> None:
        """Do nothing: the memory is the receiver's own."""


class LinkSpec(NamedTuple):
    """One link: from a rank to a rank, what travels on it, and its memory."""

    source: int
    target: int
    what: Awaited
    size: LinkSize


@final
class TreeLink:
    """Sends trees of one structure, each tensor through a link of its own."""

    def __init__(self, links: Sequence[StageLink], structure: Structure) -> None:
        self._links, self._structure = links, structure

    def put(self, tree: Tree) -> None:
        """Send a tree; its tensors may be changed when this returns."""
        if not (self._structure == "tensor" and isinstance(tree, Tensor)):
            found = trees.structure(tree)
            if found != self._structure:
                raise ManyhandsError(
                    f"a stage sends {found}, but {self._structure} was measured before the run: what it "
                    "returns must have the same structure for every batch"
                )
        for link, tensor in zip(self._links, trees.tensors(tree), strict=True):
            link.put(tensor)

    def take(self) -> Tree:
        """Receive the next tree, to be used until it is released."""
        return trees.rebuild(self._structure, iter([link.take() for link in self._links]))

    def release(self) -> None:
        """Release the oldest tree that was taken."""
        for link in self._links:
            link.release()


def open_links(transport: Transport, wanted: list[LinkSpec], device: torch.device) -> list[StageLink | None]:
    """This rank's ends of all links, None where it is at neither end; all ranks ask for the same links.

    Ranks on one host share memory, if the device can reach it; others send messages.
    """
    peers = transport.peers_on_host if device.type == "cpu" else (transport.rank,)
    inside = [each.source in peers and each.target in peers for each in wanted]
    total = sum(each.size.total for each, near in zip(wanted, inside, strict=True) if near)
    memory = transport.on_host.share("stages", total) if total else torch.empty(0, dtype=torch.uint8)
    found: list[StageLink | None] = []
    begin = 0
    for each, near in zip(wanted, inside, strict=True):
        mine = transport.rank in (each.source, each.target)
        if near:
            region = memory[begin : begin + each.size.total]
            begin += each.size.total
            found.append(SlotLink(transport.on_host, region, each.size, each.what) if mine else None)
        elif mine:
            peer = each.target if transport.rank == each.source else each.source
            found.append(MessageLink(transport, peer, each.size, device))
        else:
            found.append(None)
    return found
