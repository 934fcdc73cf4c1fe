"""Sparse samples: stored as CSR, gathered into one tensor, read from svmlight files.

The inputs of a batch are ONE integer tensor [batch, 2, width], as wide as its longest sample:

    row 0   feature   feature   feature   padding     (padding is the number of features: one past the last)
    row 1   bits      bits      bits      0           (of the values, as float32)

One tensor, because the feed moves one tensor to the device. Integers, because the feed casts floating-point
inputs to the run's dtype, and the index of a feature must not be rounded: in float32 feature 16,777,217 would
become its neighbor. So the values are stored as their bits, and the model separates both with `unpack`.
"""

from __future__ import annotations

import bz2
import gzip
import io
import zlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manyhands.core.errors import UsageError
from manyhands.data.base import Batch, Request, Samples

_NAMED = 5  # labels in the message about a file with too many
_LINES = 10_000  # parsed at once in the search for a bad line


def pack(indices: Tensor, values: Tensor) -> Tensor:
    """Features and float32 values, both [batch, width], as one tensor that the feed does not change."""
    return torch.stack([indices, values.view(torch.int32).long()], dim=1)


def unpack(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The features and the float32 values of packed inputs, bit for bit."""
    return inputs[:, 0], inputs[:, 1].to(torch.int32).view(torch.float32)


@dataclass(frozen=True, eq=False)
class SparseData:
    """A data set in compressed rows: sample i has the entries indptr[i] to indptr[i + 1].

    A sample is the same in every batch except for its padding, which depends on the longest sample.
    """

    indptr: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    targets: npt.NDArray[np.int64]
    features: int

    def __post_init__(self) -> None:
        if self.values.dtype != np.float32:
            raise ValueError(f"the values are {self.values.dtype}, not float32")
        if len(self.indptr) != len(self.targets) + 1:
            raise ValueError(f"{len(self.indptr)} row boundaries but {len(self.targets)} targets")
        entries, indices, values = int(self.indptr[-1]), len(self.indices), len(self.values)
        if not entries == indices == values:
            raise ValueError(
                f"{entries} entries by the row boundaries, {indices} indices and {values} values"
            )
        if len(self.indices) and not 0 <= self.indices.min() <= self.indices.max() < self.features:
            raise ValueError(f"indices must be from 0 to {self.features - 1}")

    def __len__(self) -> int:
        return len(self.targets)

    @cached_property
    def ragged(self) -> bool:
        """Whether batches are padded: samples differ in length, or all are empty."""
        lengths = np.diff(self.indptr)
        return bool(lengths.min() < max(1, lengths.max()))

    def stream(self, requests: Iterable[Request], seed: int) -> Generator[Batch, None, None]:
        """Gather each request. Nothing is augmented, so the seed has no effect."""
        for request in requests:
            inputs = torch.from_numpy(self._gather(request.samples))
            yield Batch(inputs, torch.from_numpy(self.targets.take(request.samples)))

    def take(self, samples: Samples) -> SparseData:
        """Some of the samples as a data set."""
        starts = self.indptr[samples]
        lengths = self.indptr[samples + 1] - starts
        indptr = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        entries = np.arange(indptr[-1]) + np.repeat(starts - indptr[:-1], lengths)
        return SparseData(
            indptr, self.indices[entries], self.values[entries], self.targets[samples], self.features
        )

    def _gather(self, samples: Samples) -> npt.NDArray[np.int64]:
        return self._gather_ragged(samples) if self.ragged else self._gather_equal(samples)

    def _gather_equal(self, samples: Samples) -> npt.NDArray[np.int64]:
        """Samples of equal length are rows of a matrix, and copying rows is three times as fast."""
        width = int(self.indptr[1])
        inputs = np.empty((len(samples), 2, width), dtype=np.int64)
        inputs[:, 0] = self.indices.reshape(-1, width).take(samples, axis=0)
        inputs[:, 1] = self.values.view(np.int32).reshape(-1, width).take(samples, axis=0)
        return inputs

    def _gather_ragged(self, samples: Samples) -> npt.NDArray[np.int64]:
        starts = self.indptr.take(samples)
        lengths = self.indptr.take(samples + 1) - starts
        width = max(1, int(lengths.max()))  # a batch of empty samples is one column of padding
        columns = np.arange(width)
        entries = starts[:, None] + columns
        padding = columns >= lengths[:, None]
        entries[padding] = 0  # any entry that exists
        inputs = np.empty((len(samples), 2, width), dtype=np.int64)
        if len(self.indices):
            inputs[:, 0] = self.indices.take(entries)
            inputs[:, 1] = self.values.view(np.int32).take(entries)
        np.copyto(inputs[:, 0], self.features, where=padding)
        np.copyto(inputs[:, 1], 0, where=padding)
        return inputs


def svmlight(path: str | Path, features: int | None = None) -> SparseData:
    """Read a file of lines `label feature:value feature:value ...`, which may be .gz or .bz2."""
    return svmlight_files([path], features)[0]


def svmlight_files(paths: Sequence[str | Path], features: int | None = None) -> list[SparseData]:
    """Read files that belong together: with the same first feature and the same labels.

    Features are counted from 1, as in the format, unless one of the files has a feature 0. Their number is
    the largest index in any of the files, or `features`. The larger of the two labels of the first file is
    the positive class, target 1. The other files may have no other labels.
    """
    files = [_read(Path(path).expanduser()) for path in paths]
    low, high = _two_labels(files[0])
    for file in files[1:]:
        if odd := sorted(set(file.labels.tolist()) - {low, high}):
            raise UsageError(
                f"{file.path} has the label {odd[0]:g}, but {files[0].path} has {low:g} and {high:g}"
            )
    used = [file.indices for file in files if len(file.indices)]
    first = int(all(indices.min() > 0 for indices in used))
    found = max([1, *(int(indices.max()) + 1 - first for indices in used)])
    if features is not None and features < found:
        names = " and ".join(str(file.path) for file in files)
        raise UsageError(f"{names} needs {found:,} features, not {features:,}")
    return [
        SparseData(
            file.indptr,
            file.indices - first,
            file.values,
            (file.labels == high).astype(np.int64),
            features or found,
        )
        for file in files
    ]


class _SvmlightFile(NamedTuple):
    """The content of a file."""

    path: Path
    indptr: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float64]


def _read(path: Path) -> _SvmlightFile:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    try:
        with _open(path) as file:
            matrix, labels = _parse(file)
    except (OSError, EOFError, zlib.error) as error:  # no permission, or not compressed as its name says
        raise UsageError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{path} is not an svmlight file: {_first_bad_line(path) or error}") from None
    if len(odd := np.flatnonzero(~np.isfinite(matrix.data))):
        sample = int(np.searchsorted(matrix.indptr, odd[0], side="right"))
        raise UsageError(
            f"{path}: sample {sample:,} has the value {matrix.data[odd[0]]}, not a finite number"
        )
    return _SvmlightFile(
        path, matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64), matrix.data, labels
    )


def _open(path: Path) -> IO[bytes]:
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open}
    return cast(IO[bytes], openers.get(path.suffix, open)(path, "rb"))


def _parse(file: IO[bytes]) -> tuple[Any, npt.NDArray[np.float64]]:
    from sklearn.datasets import load_svmlight_file

    matrix, labels = load_svmlight_file(file, dtype=np.float32, zero_based=True)
    return matrix, labels


def _first_bad_line(path: Path) -> str:
    """The first bad line and what is wrong with it. scikit-learn does not say which line."""
    first = 1
    with _open(path) as file:
        while lines := list(islice(file, _LINES)):
            if _parse_error(lines):
                numbered = ((number, _parse_error([line])) for number, line in enumerate(lines, first))
                return next((f"line {number:,}: {reason}" for number, reason in numbered if reason), "")
            first += len(lines)
    return ""


def _parse_error(lines: list[bytes]) -> str:
    try:
        _parse(io.BytesIO(b"".join(lines)))
    except (ValueError, OverflowError) as error:
        return str(error)
    return ""


def _two_labels(file: _SvmlightFile) -> tuple[float, float]:
    labels = np.unique(file.labels)
    if len(labels) != 2 or not np.isfinite(labels).all():
        some = ", ".join(f"{label:g}" for label in labels[:_NAMED])
        more = f" and {len(labels) - _NAMED:,} more" if len(labels) > _NAMED else ""
        raise UsageError(
            f"{file.path} must have exactly two labels, such as -1 and 1, found {some or 'none'}{more}"
        )
    return float(labels[0]), float(labels[1])
