"""A tensor as a row of bytes and back, and the header that lets a peer allocate memory for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError
from manyhands.transports.base import CPU

HEADER = 64  # elements: dtype code, number of dimensions, then the shape

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


def flatten(tensor: Tensor, *, keep_device: bool = False) -> Tensor:
    """The tensor as one contiguous row, on the CPU unless `keep_device`. A view if possible, else a copy."""
    detached = tensor.detach()
    if not keep_device and detached.device.type != "cpu":
        detached = detached.cpu()
    return detached.reshape(-1) if detached.is_contiguous() else detached.contiguous().view(-1)


def copy_back(row: Tensor, tensor: Tensor) -> Tensor:
    """Copy a row into the tensor that it was made of, unless it is a view of it."""
    if row.data_ptr() != tensor.data_ptr() or row.device != tensor.device:
        tensor.detach().copy_(row.view(tensor.shape))
    return tensor


def as_bytes(row: Tensor) -> Tensor:
    """A view of the same memory as bytes."""
    return row if row.dtype == torch.uint8 else row.view(torch.uint8)


def code(dtype: torch.dtype) -> int:
    """The number that stands for a dtype in a header."""
    return _CODES[dtype]


def dtype(code: int) -> torch.dtype:
    """The dtype that a number stands for."""
    return _DTYPES[code]


def header(tensor: Tensor) -> Tensor:
    """Dtype and shape of a tensor, as HEADER integers."""
    if tensor.dtype not in _CODES or tensor.dim() > HEADER - 2:
        raise ManyhandsError(f"a tensor of {tensor.dtype} with {tensor.dim()} dimensions cannot be gathered")
    fields = [_CODES[tensor.dtype], tensor.dim(), *tensor.shape]
    return torch.tensor(fields + [0] * (HEADER - len(fields)), dtype=torch.int64)


def allocate(header: Sequence[int], device: torch.device = CPU) -> Tensor:
    """An uninitialized tensor of the dtype and shape in a header."""
    code, dimensions = header[:2]
    return torch.empty(tuple(header[2 : 2 + dimensions]), dtype=_DTYPES[code], device=device)


def add_in_order(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """Sum into `out`, always in this order, so that the result has the same bits everywhere."""
    if len(parts) == 1:
        return out.copy_(parts[0])
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
    return out


def slices(length: int, parts: int, multiple: int = 64) -> list[slice]:
    """Divide a row among ranks into slices that begin on a cache line. The last ones may be empty."""
    each = math.ceil(length / parts / multiple) * multiple
    return [slice(min(rank * each, length), min((rank + 1) * each, length)) for rank in range(parts)]
