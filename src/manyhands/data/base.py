"""What a data set is to a trainer: a length, and batches for the samples it asks for."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

Samples = npt.NDArray[np.int64]


class Batch(NamedTuple):
    """Some samples, gathered: raw inputs (a task's `preprocess` makes them the model's) and targets."""

    inputs: Tensor
    targets: Tensor

    @property
    def size(self) -> int:
        """How many samples these are."""
        return int(self.targets.shape[0])


class Request(NamedTuple):
    """Which samples to read next; the epoch decides how they are augmented, nothing else."""

    epoch: int
    samples: Samples


class Dataset(Protocol):
    """Samples by number.

    `stream` answers requests in their order and may read ahead of its reader. What it yields is a pure
    function of (seed, epoch, sample): neither the batch around a sample nor the number of decoders matters.
    """

    def __len__(self) -> int: ...

    def stream(self, requests: Iterable[Request], seed: int) -> Generator[Batch, None, None]: ...


@runtime_checkable
class Pooled(Protocol):
    """A data set that reads with threads: inside `pooled`, all its streams are read by the same ones."""

    def pooled(self) -> AbstractContextManager[Dataset]: ...
