"""A tensor as a row of bytes and back, and what a peer must know to make room for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError
from manyhands.transports.base import CPU

HEADER = 64  # numbers: dtype, dimensions, then the shape

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


def row(tensor: Tensor, *, stay: bool = False) -> Tensor:
    """The tensor as one contiguous row, on the CPU unless it may stay: itself where it is one, or a copy."""
    inside = tensor.detach()
    if not stay and inside.device.type != "cpu":
        inside = inside.cpu()
    return inside.reshape(-1) if inside.is_contiguous() else inside.contiguous().view(-1)


def back(made: Tensor, tensor: Tensor) -> Tensor:
    """Put a row into the tensor it was made of, where it is not the tensor itself."""
    if made.data_ptr() != tensor.data_ptr() or made.device != tensor.device:
        tensor.detach().copy_(made.view(tensor.shape))
    return tensor


def as_bytes(made: Tensor) -> Tensor:
    """The same memory, byte by byte."""
    return made if made.dtype == torch.uint8 else made.view(torch.uint8)


def code(dtype: torch.dtype) -> int:
    """A type as a number."""
    return _CODES[dtype]


def dtype(code: int) -> torch.dtype:
    """The type of a number."""
    return _DTYPES[code]


def header(tensor: Tensor) -> Tensor:
    """Dtype and shape as numbers, always as many."""
    if tensor.dtype not in _CODES or tensor.dim() > HEADER - 2:
        raise ManyhandsError(f"a tensor of {tensor.dtype} with {tensor.dim()} dimensions cannot be gathered")
    numbers = [_CODES[tensor.dtype], tensor.dim(), *tensor.shape]
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64)


def room(numbers: Sequence[int], device: torch.device = CPU) -> Tensor:
    """An empty tensor as a header describes it."""
    code, dimensions = numbers[:2]
    return torch.empty(tuple(numbers[2 : 2 + dimensions]), dtype=_DTYPES[code], device=device)


def add_in_order(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """Sum into `out`, always in this order, so that it has the same bits wherever it is done."""
    if len(parts) == 1:
        return out.copy_(parts[0])
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
    return out


def cut(length: int, parts: int, grain: int = 64) -> list[slice]:
    """Share a row out among ranks in slices that begin on whole cache lines; the last ones may be empty."""
    each = math.ceil(length / parts / grain) * grain
    return [slice(min(rank * each, length), min((rank + 1) * each, length)) for rank in range(parts)]
