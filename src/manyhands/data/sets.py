"""The known data sets as tensors in memory, downloaded if necessary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from manyhands.data import catalog, cifar_records, download, idx
from manyhands.data.arrays import ArrayData


class Splits(NamedTuple):
    """The training set and the test set."""

    train: ArrayData
    test: ArrayData


def load(name: str) -> Splits:
    """A data set by its name: images as bytes [n, channels, height, width], labels as int64."""
    entry = catalog.entry(name)
    return READERS[name](download.fetch(entry))


def _idx_splits(paths: dict[str, Path]) -> Splits:
    def split(prefix: str) -> ArrayData:
        images = idx.read(paths[f"{prefix}-images-idx3-ubyte"])
        return _tensors(images[:, None], idx.read(paths[f"{prefix}-labels-idx1-ubyte"]))

    return Splits(split("train"), split("t10k"))


def _cifar_splits(paths: dict[str, Path]) -> Splits:
    def split(part: str) -> ArrayData:
        return _tensors(*cifar_records.read(paths[f"cifar-10-{part}.bin"]))

    return Splits(split("train"), split("test"))


def _tensors(images: npt.NDArray[Any], labels: npt.NDArray[Any]) -> ArrayData:
    # Contiguous, so that a gather copies one block per sample.
    return ArrayData(
        torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.astype(np.int64))
    )


READERS: dict[str, Callable[[dict[str, Path]], Splits]] = {
    "mnist": _idx_splits,
    "fashion-mnist": _idx_splits,
    "cifar-10": _cifar_splits,
}
