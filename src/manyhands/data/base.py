"""The interface of a data set: its length, and batches of the samples that a trainer requests."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from manyhands.data import trees
from manyhands.data.trees import Tree

Samples = npt.NDArray[np.int64]


class Batch(NamedTuple):
    """Raw inputs (a task's `preprocess` turns them into the inputs of its model) and targets.

    Each is a tensor, or a dict, tuple, list or dataclass of tensors. The first dimension of every tensor
    counts the samples. A model whose `forward` has several parameters gets a dict by name and a tuple by
    position.
    """

    inputs: Tree
    targets: Tree

    @property
    def size(self) -> int:
        """The number of samples."""
        return trees.size(self.targets, self.inputs)


class Request(NamedTuple):
    """The samples to read next. The epoch only decides how they are augmented."""

    epoch: int
    samples: Samples


class Dataset(Protocol):
    """Samples by index.

    `stream` yields one batch per request, in order, and may read ahead. A sample is a pure function of (seed,
    epoch, sample): neither its batch nor the number of decoders matters.
    """

    def __len__(self) -> int: ...

    def stream(self, requests: Iterable[Request], seed: int) -> Generator[Batch, None, None]: ...


@runtime_checkable
class Pooled(Protocol):
    """A data set that reads with threads. Inside `pooled`, all its streams share the same threads."""

    def pooled(self) -> AbstractContextManager[Dataset]: ...
