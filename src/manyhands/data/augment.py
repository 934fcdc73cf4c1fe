"""Random crops and flips of a whole batch of small images, as a function of (seed, epoch, sample)."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from manyhands.data.arrays import ArrayData
from manyhands.data.base import Batch, Request
from manyhands.data.order import key, mix


@dataclass(frozen=True, eq=False)
class CropAndFlip:
    """Images [n, channels, height, width], shifted by up to `padding` pixels and randomly mirrored."""

    data: ArrayData
    padding: int

    def __len__(self) -> int:
        return len(self.data)

    def stream(self, requests: Iterable[Request], seed: int) -> Generator[Batch, None, None]:
        for request in requests:
            (batch,) = self.data.stream([request], seed)
            yield Batch(self._augment(batch.inputs, request, seed), batch.targets)

    def _augment(self, images: Tensor, request: Request, seed: int) -> Tensor:
        _, _, height, width = images.shape
        drawn = mix(request.samples.astype(np.uint64) ^ np.uint64(key(seed, request.epoch, 1)))
        shifts = np.uint64(2 * self.padding + 1)
        down = torch.from_numpy(((drawn & np.uint64(0xFFFF)) % shifts).astype(np.int64))
        right = torch.from_numpy((((drawn >> np.uint64(16)) & np.uint64(0xFFFF)) % shifts).astype(np.int64))
        mirrored = torch.from_numpy(((drawn >> np.uint64(32)) & np.uint64(1)).astype(np.bool_))
        rows = down[:, None] + torch.arange(height)
        columns = right[:, None] + torch.arange(width)
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        padded = functional.pad(images, [self.padding] * 4)
        sample = torch.arange(len(images))[:, None, None]
        # indexing with three index arrays around the channel slice puts the channels last
        return padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
