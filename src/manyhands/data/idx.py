"""The idx format: two zero bytes, type, number of dimensions, the dimensions, the values; big-endian."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manyhands.core.errors import DataUnavailableError

TYPES: dict[int, np.dtype[Any]] = {
    0x08: np.dtype(np.uint8),
    0x09: np.dtype(np.int8),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}


def read(path: Path) -> npt.NDArray[Any]:
    """The array in a file."""
    return parse(path.read_bytes(), str(path))


def parse(data: bytes, name: str = "idx data") -> npt.NDArray[Any]:
    """A copy of the array in these bytes, in native byte order. `name` is used in error messages."""
    if len(data) < 4 or data[:2] != b"\0\0":
        raise DataUnavailableError(
            f"{name} is not an idx file: it starts with {data[:4].hex(' ') or 'nothing'}"
        )
    if data[2] not in TYPES:
        known = ", ".join(f"0x{code:02x}" for code in TYPES)
        raise DataUnavailableError(f"{name} has the unknown type 0x{data[2]:02x} (known: {known})")
    kind, rank = TYPES[data[2]], data[3]
    start = 4 + 4 * rank
    if len(data) < start:
        raise DataUnavailableError(f"{name} ends inside its header: {len(data)} of {start} bytes")
    shape = struct.unpack(f">{rank}I", data[4:start])
    length = start + math.prod(shape) * kind.itemsize
    if len(data) != length:
        sizes = " x ".join(map(str, shape)) or "1"
        raise DataUnavailableError(f"{name} has {len(data)} bytes, but {sizes} values need {length}")
    values: npt.NDArray[Any] = np.frombuffer(data, kind, offset=start).astype(kind.newbyteorder("="))
    return values.reshape(shape)
