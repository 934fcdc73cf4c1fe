"""Hooks for the tensors that autograd saves: each is kept, or moved to a store and back.

There is one log per forward pass. It stores the order in which tensors were moved, so that backward, which
needs them in reverse, can prefetch the next ones. A storage is moved once, even if several views are saved.

With hooks, autograd no longer checks that a saved tensor was not changed in place. So the log keeps a version
counter for each: a tensor without memory that shares the counter of the original.
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

from manyhands.offload.activation_store import ActivationStore, OffloadedBuffer

MIN_BYTES = 256 * 1024  # smaller tensors are not moved
AHEAD = 64 * 2**20  # bytes that are prefetched
LINE = 64  # bytes of a cache line: kernels may depend on the offset in it, so it is preserved


class MovedSpan:
    """A span of a storage that was moved."""

    def __init__(self, store: ActivationStore, source: Tensor, start: int, counter: Tensor) -> None:
        self.start, self.nbytes = start, source.nbytes
        self.counter, self.version = counter, counter._version
        self.views = 0  # saved tensors that are views of it
        self.due = 0  # views that backward has not used since it was prefetched
        self.used = False  # whether this backward pass has used it
        self._store = store
        self.stored: OffloadedBuffer = store.send(source)

    def fetch(self) -> None:
        """Begin to load it."""
        if not self.stored.prefetched:
            self.due = self.views
            self._store.prefetch(self.stored)

    def bytes(self) -> Tensor:
        """Wait for its bytes. After the last view, only autograd holds the loaded copy."""
        self.fetch()
        buffer = self._store.load(self.stored)
        self.due -= 1
        if self.due <= 0:
            self.used = True
            self._store.release(self.stored)
        return buffer

    def remove_view(self) -> None:
        """One view is gone without being used."""
        self.views -= 1
        self.due -= 1
        if self.stored.prefetched and self.due <= 0 < self.views:
            self._store.release(self.stored)

    def __del__(self) -> None:
        stored = getattr(self, "stored", None)  # there is none if sending it failed
        if stored is not None:
            self._store.drop(stored)


class Saved:
    """One tensor that autograd saved: the tensor itself, or its position in a moved span."""

    def __init__(self, log: SavedTensorLog, tensor: Tensor, version: int) -> None:
        self.log, self.position = log, len(log.spans)
        self.tensor: Tensor | None = tensor
        self.version = version
        self.span: MovedSpan | None = None
        self._asked = False

    def move(self, span: MovedSpan) -> None:
        """Replace the tensor by its position in a span."""
        assert self.tensor is not None
        tensor = self.tensor
        self._like = tensor.dtype, tensor.size(), tensor.stride()
        self._begin = int(tensor.storage_offset()) * tensor.element_size() - span.start
        self.span, self.tensor = span, None
        span.views += 1

    def restore(self) -> Tensor:
        """The tensor. Raises the error of autograd if it was changed in place."""
        span = self.span
        counter = self.tensor if span is None else span.counter
        assert counter is not None
        if counter._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: it is at version {counter._version}, version {self.version} was saved"
            )
        if span is not None and span.used:
            self.log.restart()
        self.log.prefetch_before(self.position)
        if span is None:
            assert self.tensor is not None
            return self.tensor
        self._asked = True
        return _view_as(span.bytes(), self._begin, self._like)

    def __del__(self) -> None:
        if self.span is not None and not self._asked:
            self.span.remove_view()
        elif self.span is not None:
            self.span.views -= 1


class SavedTensorLog:
    """The saved tensors of one forward pass. While `moving` is true, they are moved."""

    def __init__(
        self,
        store: ActivationStore,
        held: Iterable[Tensor],
        *,
        moving: bool = True,
        promote: bool = False,
        ahead: int = AHEAD,
        min_bytes: int | None = None,
    ) -> None:
        self._store, self.moving, self._promote = store, moving, promote
        self._ahead, self._min_bytes = ahead, MIN_BYTES if min_bytes is None else min_bytes
        # tensors that others hold anyway: moving them frees nothing
        self._held = {pointer for tensor in held if (pointer := _address(tensor))}
        self.spans: list[weakref.ref[MovedSpan]] = []
        # by storage; the reference keeps its id from being reused
        self._by_storage: dict[int, tuple[StorageWeakRef, list[weakref.ref[MovedSpan]]]] = {}
        self._kept: dict[int, list[weakref.ref[Saved]]] = {}
        self.kept_bytes = 0

    def pack(self, tensor: Tensor) -> Any:
        """Called by autograd to save a tensor."""
        saved = Saved(self, tensor.detach(), tensor._version)
        if not self._movable(tensor):
            return saved
        storage = tensor.untyped_storage()
        number = storage._cdata
        start, nbytes = _span(tensor)
        if nbytes < self._min_bytes:
            if storage.nbytes() >= 2 * self._min_bytes:  # a small view would keep the whole storage
                saved.tensor = _copy_of_view(tensor, start, nbytes)
            return saved
        span = self._find(number, tensor, start, nbytes)
        if span is None and self.moving:
            span = self._send(tensor, start, nbytes)
        if span is not None:
            saved.move(span)
        else:
            self._kept.setdefault(number, []).append(weakref.ref(saved))
            self.kept_bytes += nbytes
        return saved

    def unpack(self, saved: Saved) -> Tensor:
        """Called by backward, once or several times."""
        return saved.restore()

    def prefetch_before(self, position: int) -> None:
        """Prefetch what backward needs next, up to the limit."""
        room = self._ahead
        for number in range(position - 1, -1, -1):
            span = self.spans[number]()
            if span is None:
                continue
            room -= span.nbytes
            if room < 0:
                return
            if not span.used:
                span.fetch()

    def restart(self) -> None:
        """Another backward pass begins: it needs everything again."""
        for reference in self.spans:
            span = reference()
            if span is not None:
                span.used = False

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
        if owner.is_leaf and owner.requires_grad:  # a parameter that is not registered with the module
            return False
        return _address(tensor) not in self._held

    def _find(self, number: int, tensor: Tensor, start: int, nbytes: int) -> MovedSpan | None:
        """The span that contains this tensor in its current version."""
        alive, spans = self._by_storage.get(number, (None, []))
        if alive is None or alive.expired():  # type: ignore[no-untyped-call]
            return None
        for reference in spans:
            span = reference()
            if (
                span is not None
                and span.start <= start
                and start + nbytes <= span.start + span.nbytes
                and (tensor.storage_offset() * tensor.element_size() - span.start) % tensor.element_size()
                == 0
                and span.version == span.counter._version == tensor._version
                and _share_counter(span.counter, tensor)
            ):
                return span
        return None

    def _send(self, tensor: Tensor, start: int, nbytes: int) -> MovedSpan:
        storage = tensor.untyped_storage()
        span = MovedSpan(self._store, _bytes(tensor, start, nbytes), start, _version_counter(tensor))
        number = storage._cdata
        alive, spans = self._by_storage.get(number, (None, []))
        if alive is None or alive.expired():  # type: ignore[no-untyped-call]
            alive, spans = StorageWeakRef(storage), []  # type: ignore[no-untyped-call]
            self._by_storage[number] = alive, spans
        spans.append(weakref.ref(span))
        self.spans.append(weakref.ref(span))
        if self._promote:
            self._move_earlier(number, span)
        return span

    def _move_earlier(self, number: int, span: MovedSpan) -> None:
        """Move views of this span that were kept: they would keep the whole storage."""
        for reference in self._kept.pop(number, []):
            saved = reference()
            if saved is None or saved.tensor is None:
                continue
            start, nbytes = _span(saved.tensor)
            within = span.start <= start and start + nbytes <= span.start + span.nbytes
            if within and saved.version == span.version and _share_counter(span.counter, saved.tensor):
                saved.move(span)
                self.kept_bytes -= nbytes


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _span(tensor: Tensor) -> tuple[int, int]:
    """The start of a tensor in its storage, and how many bytes it spans (few, if it is expanded)."""
    width = tensor.element_size()
    reach = sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * width
    start = begin // LINE * LINE
    return start, begin + (reach + 1) * width - start


def _bytes(tensor: Tensor, start: int, nbytes: int) -> Tensor:
    """A part of the storage of a tensor, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(), start, (nbytes,), (1,)
    )


def _view_as(buffer: Tensor, begin: int, like: tuple[torch.dtype, torch.Size, tuple[int, ...]]) -> Tensor:
    """Bytes as a tensor of this dtype, size and strides, from an offset on."""
    dtype, size, stride = like
    usable = buffer[: buffer.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
    return usable.as_strided(size, stride, usable.storage_offset() + begin // dtype.itemsize)


def _copy_of_view(tensor: Tensor, start: int, nbytes: int) -> Tensor:
    """A copy of a small view with the same strides, which shares the version counter of the original."""
    begin = int(tensor.storage_offset()) * tensor.element_size() - start
    counting = tensor.detach()
    copy = _bytes(tensor, start, nbytes).clone()
    counting.data = _view_as(copy, begin, (tensor.dtype, tensor.size(), tensor.stride()))
    return counting


def _version_counter(tensor: Tensor) -> Tensor:
    """A tensor without memory that shares the version counter of this one."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def _share_counter(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share a version counter. Parts of one storage may have different ones."""
    before = one._version
    with _unsafe_preserve_version_counter(other):
        increment_version(other)
        return one._version != before
