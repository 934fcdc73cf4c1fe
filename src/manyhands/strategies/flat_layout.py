"""Where parameters lie in flat memory, and how gradients get there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

ALIGNED = 16  # numbers: no two parameters, and no two workers, write to one cache line


class ParameterSlot(NamedTuple):
    """Where a parameter or a buffer begins."""

    name: str
    parameter: Tensor
    start: int


def lay_out(named: Iterable[tuple[str, Tensor]]) -> tuple[list[ParameterSlot], int]:
    """One after the other, each at a cache line of its own, and the numbers that they take together."""
    spots, end = [], 0
    for name, tensor in named:
        spots.append(ParameterSlot(name, tensor, end))
        end += aligned(tensor.numel())
    return spots, end


def aligned(numbers: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-numbers // ALIGNED) * ALIGNED


def laid(flat: Tensor, spot: ParameterSlot) -> Tensor:
    """A parameter's place in flat memory, in its own shape and order in memory where that is dense."""
    parameter = spot.parameter
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, flat.storage_offset() + spot.start)


def catch(parameter: nn.Parameter, target: Tensor, touched: list[bool], number: int) -> None:
    """Move each gradient to its place as soon as it is there, while it is still in the cache.

    The first of a step overwrites, later ones add. The alternative, letting autograd add into the place,
    needs zeroing it first: more traffic, and slower.
    """

    def caught(parameter: Tensor) -> None:
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

    parameter.register_post_accumulate_grad_hook(caught)  # type: ignore[no-untyped-call]
