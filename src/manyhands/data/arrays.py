"""A data set in memory as tensors: a batch is one gather per tensor, without a loop over samples."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manyhands.core.errors import UsageError
from manyhands.data import trees
from manyhands.data.base import Batch, Request
from manyhands.data.trees import Tree


@dataclass(frozen=True, eq=False)
class ArrayData:
    """A data set of tensors or numpy arrays whose first dimension counts the samples.

    Inputs and targets may each be one array, or a dict, tuple, list or dataclass of arrays.
    """

    inputs: Tree
    targets: Tree

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", trees.each(as_tensor, self.inputs))
        object.__setattr__(self, "targets", trees.each(as_tensor, self.targets))
        held = [*trees.named(self.inputs, "inputs"), *trees.named(self.targets, "targets")]
        lengths = {name: _length(name, tensor) for name, tensor in held if isinstance(tensor, Tensor)}
        if not lengths:
            raise UsageError(
                "the data hold no tensor: turn lists of numbers into tensors (torch.tensor) or numpy arrays"
            )
        (first, length), *others = lengths.items()
        for name, other in others:
            if other != length:
                raise UsageError(f"{length:,} {first} but {other:,} {name}: each sample needs both")

    def __len__(self) -> int:
        return trees.size(self.targets, self.inputs)

    def stream(self, requests: Iterable[Request], seed: int) -> Generator[Batch, None, None]:
        """Gather each request. Arrays are not augmented, so the seed has no effect."""
        for request in requests:
            index = torch.from_numpy(request.samples.copy())  # a copy, because the order is read-only

            def gathered(tensor: Tensor, index: Tensor = index) -> Tensor:
                return tensor.index_select(0, index)

            yield Batch(trees.mapped(gathered, self.inputs), trees.mapped(gathered, self.targets))


def as_tensor(value: object) -> object:
    """A numpy array or a table of pandas as a tensor; a tensor, None or a number as it is.

    The tensor shares the memory of an array where it can.
    """
    if callable(to_numpy := getattr(value, "to_numpy", None)):
        value = to_numpy()
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind not in "biuf":
        raise UsageError(
            f"an array of {value.dtype} cannot be a tensor: turn texts and objects into numbers first"
        )
    native = value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
    return torch.from_numpy(native if native.flags.writeable else native.copy())


def _length(name: str, tensor: Tensor) -> int:
    if not tensor.ndim:
        raise UsageError(f"{name} is one number, but its first dimension must count the samples")
    return int(tensor.shape[0])
