"""A data set in memory as two tensors: a batch is one gather, without a loop over samples."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.data.base import Batch, Request


@dataclass(frozen=True, eq=False)
class ArrayData:
    """A data set of tensors whose first dimension counts the samples."""

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if self.inputs.shape[0] != self.targets.shape[0]:
            raise ValueError(f"{self.inputs.shape[0]} inputs but {self.targets.shape[0]} targets")

    def __len__(self) -> int:
        return int(self.targets.shape[0])

    def stream(self, requests: Iterable[Request], seed: int) -> Generator[Batch, None, None]:
        """Gather each request. Arrays are not augmented, so the seed has no effect."""
        for request in requests:
            index = torch.from_numpy(request.samples.copy())  # a copy, because the order is read-only
            yield Batch(self.inputs.index_select(0, index), self.targets.index_select(0, index))
