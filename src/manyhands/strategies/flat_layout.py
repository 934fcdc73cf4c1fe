"""Where parameters lie in flat memory, how it is sliced among workers, and how gradients get there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

ALIGNED = 16  # elements: no two parameters, and no two workers, write to one cache line


class ParameterSlot(NamedTuple):
    """Where a parameter or a buffer begins in flat memory."""

    name: str
    parameter: Tensor
    start: int

    def view(self, flat: Tensor) -> Tensor:
        """This slot of flat memory in the parameter's shape, and with its strides where it is dense."""
        strides = torch.empty_like(self.parameter, device="meta").stride()
        return flat.as_strided(self.parameter.shape, strides, flat.storage_offset() + self.start)

    def within(self, part: slice) -> slice:
        """The slot's range inside a slice of flat memory; empty where they do not overlap."""
        end = self.start + self.parameter.numel()
        low = min(max(part.start, self.start), end)
        return slice(low, max(low, min(part.stop, end)))

    def inside(self, part: slice) -> bool:
        """Whether all of it is in a slice of flat memory."""
        return bool(part.start <= self.start and self.start + self.parameter.numel() <= part.stop)

    def piece(self, part: slice, tensor: Tensor) -> Tensor:
        """What a slice of flat memory holds of a whole tensor of this parameter's shape, as a copy.

        It is in the order in which the parameter lies in memory, which need not be that of its indices.
        """
        inside = self.within(part)
        flat = torch.empty_like(self.parameter, dtype=tensor.dtype, device="cpu").copy_(tensor)
        flat = flat.as_strided((self.parameter.numel(),), (1,))
        return flat[inside.start - self.start : inside.stop - self.start].detach().clone()


def lay_out(named: Iterable[tuple[str, Tensor]]) -> tuple[list[ParameterSlot], int]:
    """Slots for tensors one after the other, each at its own cache line; and the elements they take."""
    slots, end = [], 0
    for name, tensor in named:
        slots.append(ParameterSlot(name, tensor, end))
        end += aligned(tensor.numel())
    return slots, end


def aligned(elements: int) -> int:
    """Round up to whole cache lines."""
    return -(-elements // ALIGNED) * ALIGNED


def slice_of(length: int, index: int, count: int) -> slice:
    """Slice number `index` of `count` nearly equal ones; all borders are at cache lines, as `length` is."""
    low, high = (number * (length // ALIGNED) // count * ALIGNED for number in (index, index + 1))
    return slice(low, high)


def dealt_slice(slots: list[ParameterSlot], length: int, index: int, count: int) -> slice:
    """Slice number `index` of `count`, with borders between parameters: whole ones, as even as they allow."""
    borders = [*(slot.start for slot in slots), length]
    low, high = (
        min(borders, key=lambda border: abs(border - number * length / count)) if number else 0
        for number in (index, index + 1)
    )
    return slice(low, length if index + 1 == count else high)


def redirect_gradient(parameter: nn.Parameter, target: Tensor, touched: list[bool], number: int) -> None:
    """Move each gradient into `target` as soon as backward has produced it, while it is still in the cache.

    The first gradient of a step overwrites, later ones add. The alternative, to let autograd add into the
    target, needs it zeroed first: that is more memory traffic, and slower.
    """

    def redirect(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if touched[number]:
            target.add_(gradient)
        else:
            target.copy_(gradient)
            touched[number] = True
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(redirect)  # type: ignore[no-untyped-call]
