"""What autograd saves on the way forward, packed and unpacked: kept as it is, or moved to a store and back.

One tape a forward pass. It remembers in which order tensors were moved, so that backward, which asks for them
in reverse, finds the next ones here already. A storage is moved once, however many views of it are saved.

Hooks cost autograd its own check that a saved tensor was not changed in place afterwards; so each saved
tensor leaves a witness here: a tensor without memory that counts changes with the original.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from manyhands.offload.activation_store import ActivationStore, Parcel

WORTH = 256 * 1024  # bytes below which a tensor is not worth moving
AHEAD = 64 * 2**20  # bytes that are fetched before they are needed
LINE = 64  # kernels may choose by an address's place in a cache line: it stays what it was


class Record:
    """One span of a storage that was moved."""

    def __init__(self, store: ActivationStore, source: Tensor, start: int, witness: Tensor) -> None:
        self.start, self.nbytes = start, source.nbytes
        self.witness, self.version = witness, witness._version
        self.views = 0  # saved tensors that are views of it
        self.due = 0  # of them, those that backward has not asked for since it was fetched
        self.spent = False  # whether this backward pass is done with it
        self._store = store
        self.parcel: Parcel = store.send(source)

    def fetch(self) -> None:
        """Begin to."""
        if not self.parcel.wanted:
            self.due = self.views
            self._store.want(self.parcel)

    def bytes(self) -> Tensor:
        """Its bytes, waited for; with the last view that asks the copy here is left to autograd alone."""
        self.fetch()
        buffer = self._store.take(self.parcel)
        self.due -= 1
        if self.due <= 0:
            self.spent = True
            self._store.leave(self.parcel)
        return buffer

    def forgo(self) -> None:
        """One view less will ask."""
        self.views -= 1
        self.due -= 1
        if self.parcel.wanted and self.due <= 0 < self.views:
            self._store.leave(self.parcel)

    def __del__(self) -> None:
        parcel = getattr(self, "parcel", None)  # there is none where sending it failed
        if parcel is not None:
            self._store.drop(parcel)


class Saved:
    """One tensor that autograd saved: the tensor itself, or where in a record it is."""

    def __init__(self, tape: Tape, tensor: Tensor, version: int) -> None:
        self.tape, self.place = tape, len(tape.records)
        self.tensor: Tensor | None = tensor
        self.version = version
        self.record: Record | None = None
        self._asked = False

    def move(self, record: Record) -> None:
        """From now on it is in a record."""
        assert self.tensor is not None
        held = self.tensor
        self._like = held.dtype, held.size(), held.stride()
        self._begin = int(held.storage_offset()) * held.element_size() - record.start
        self.record, self.tensor = record, None
        record.views += 1

    def restore(self) -> Tensor:
        """The tensor, or autograd's complaint where it has been changed meanwhile."""
        record = self.record
        witness = self.tensor if record is None else record.witness
        assert witness is not None
        if witness._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: it is at version {witness._version}, version {self.version} was saved"
            )
        if record is not None and record.spent:
            self.tape.again()
        self.tape.ahead_of(self.place)
        if record is None:
            assert self.tensor is not None
            return self.tensor
        self._asked = True
        return _seen_as(record.bytes(), self._begin, self._like)

    def __del__(self) -> None:
        if self.record is not None and not self._asked:
            self.record.forgo()
        elif self.record is not None:
            self.record.views -= 1


class Tape:
    """The saved tensors of one forward pass; `moving` says whether those of now are moved."""

    def __init__(
        self,
        store: ActivationStore,
        held: Iterable[Tensor],
        *,
        moving: bool = True,
        promote: bool = False,
        ahead: int = AHEAD,
        worth: int | None = None,
    ) -> None:
        self._store, self.moving, self._promote = store, moving, promote
        self._ahead, self._worth = ahead, WORTH if worth is None else worth
        # what others hold anyway: moving it frees nothing
        self._held = {pointer for tensor in held if (pointer := _address(tensor))}
        self.records: list[weakref.ref[Record]] = []
        # by storage: the reference keeps its number from being given to another storage
        self._known: dict[int, tuple[StorageWeakRef, list[weakref.ref[Record]]]] = {}
        self._kept: dict[int, list[weakref.ref[Saved]]] = {}
        self.kept_bytes = 0

    def pack(self, tensor: Tensor) -> Any:
        """Called when autograd saves a tensor."""
        saved = Saved(self, tensor.detach(), tensor._version)
        if not self._movable(tensor):
            return saved
        storage = tensor.untyped_storage()
        number = storage._cdata
        start, nbytes = _span(tensor)
        if nbytes < self._worth:
            if storage.nbytes() >= 2 * self._worth:  # a small view would keep all of it
                saved.tensor = _alone(tensor, start, nbytes)
            return saved
        record = self._find(number, tensor, start, nbytes)
        if record is None and self.moving:
            record = self._send(tensor, start, nbytes)
        if record is not None:
            saved.move(record)
        else:
            self._kept.setdefault(number, []).append(weakref.ref(saved))
            self.kept_bytes += nbytes
        return saved

    def unpack(self, saved: Saved) -> Tensor:
        """Called when backward needs it, once or several times."""
        return saved.restore()

    def ahead_of(self, place: int) -> None:
        """Backward is here: fetch what it needs next, as much as may be here at a time."""
        room = self._ahead
        for number in range(place - 1, -1, -1):
            record = self.records[number]()
            if record is None:
                continue
            room -= record.nbytes
            if room < 0:
                return
            if not record.spent:
                record.fetch()

    def again(self) -> None:
        """A backward pass began anew: what the last one was done with is needed again."""
        for reference in self.records:
            record = reference()
            if record is not None:
                record.spent = False

    def _movable(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.numel() == 0:
            return False
        if (
            type(tensor) not in (Tensor, nn.Parameter)
            or tensor.is_quantized
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return False
        owner = tensor._base if tensor._base is not None else tensor
        if owner.is_leaf and owner.requires_grad:  # a parameter, though the module does not call it so
            return False
        return _address(tensor) not in self._held

    def _find(self, number: int, tensor: Tensor, start: int, nbytes: int) -> Record | None:
        """The record that has this tensor as it is now."""
        alive, records = self._known.get(number, (None, []))
        if alive is None or alive.expired():  # type: ignore[no-untyped-call]
            return None
        for reference in records:
            record = reference()
            if (
                record is not None
                and record.start <= start
                and start + nbytes <= record.start + record.nbytes
                and (tensor.storage_offset() * tensor.element_size() - record.start) % tensor.element_size()
                == 0
                and record.version == record.witness._version == tensor._version
                and _count_together(record.witness, tensor)
            ):
                return record
        return None

    def _send(self, tensor: Tensor, start: int, nbytes: int) -> Record:
        storage = tensor.untyped_storage()
        record = Record(self._store, _bytes(tensor, start, nbytes), start, _witness(tensor))
        number = storage._cdata
        alive, records = self._known.get(number, (None, []))
        if alive is None or alive.expired():  # type: ignore[no-untyped-call]
            alive, records = StorageWeakRef(storage), []  # type: ignore[no-untyped-call]
            self._known[number] = alive, records
        records.append(weakref.ref(record))
        self.records.append(weakref.ref(record))
        if self._promote:
            self._move_earlier(number, record)
        return record

    def _move_earlier(self, number: int, record: Record) -> None:
        """Views of the same span that were kept would keep all of it: they go with it."""
        for reference in self._kept.pop(number, []):
            saved = reference()
            if saved is None or saved.tensor is None:
                continue
            start, nbytes = _span(saved.tensor)
            within = record.start <= start and start + nbytes <= record.start + record.nbytes
            if within and saved.version == record.version and _count_together(record.witness, saved.tensor):
                saved.move(record)
                self.kept_bytes -= nbytes


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where in its storage a tensor begins, and how many bytes it reaches over; an expanded one is small."""
    width = tensor.element_size()
    reach = sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * width
    start = begin // LINE * LINE
    return start, begin + (reach + 1) * width - start


def _bytes(tensor: Tensor, start: int, nbytes: int) -> Tensor:
    """A part of its storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(), start, (nbytes,), (1,)
    )


def _seen_as(buffer: Tensor, begin: int, like: tuple[torch.dtype, torch.Size, tuple[int, ...]]) -> Tensor:
    """Bytes as a tensor of a kind, size and strides, which begins at one of them."""
    dtype, size, stride = like
    usable = buffer[: buffer.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
    return usable.as_strided(size, stride, usable.storage_offset() + begin // dtype.itemsize)


def _alone(tensor: Tensor, start: int, nbytes: int) -> Tensor:
    """A copy of a small view, strides and all, whose changes are counted with the original's."""
    begin = int(tensor.storage_offset()) * tensor.element_size() - start
    counting = tensor.detach()
    copy = _bytes(tensor, start, nbytes).clone()
    counting.data = _seen_as(copy, begin, (tensor.dtype, tensor.size(), tensor.stride()))
    return counting


def _witness(tensor: Tensor) -> Tensor:
    """A tensor without memory that counts changes with this one."""
    witness = tensor.detach()
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness


def _count_together(one: Tensor, other: Tensor) -> bool:
    """Whether a change in place of one is counted at the other; parts of a storage may count each its own."""
    before = one._version
    with _unsafe_preserve_version_counter(other):
        increment_version(other)
        return one._version != before
