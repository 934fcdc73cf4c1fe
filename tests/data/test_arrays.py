"""Arrays are gathered in one go, and augmented as a pure function of (seed, epoch, sample)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from manyhands.core.errors import UsageError
from manyhands.data.arrays import ArrayData
from manyhands.data.augment import CropAndFlip
from manyhands.data.base import Batch, Request


def read(data: ArrayData | CropAndFlip, samples: list[int], epoch: int = 0, seed: int = 0) -> Batch:
    (batch,) = data.stream([Request(epoch, np.array(samples, dtype=np.int64))], seed)
    return batch


@pytest.fixture
def images() -> ArrayData:
    generator = torch.Generator().manual_seed(0)
    return ArrayData(
        torch.randint(1, 256, (50, 3, 6, 8), generator=generator, dtype=torch.uint8), torch.arange(50)
    )


def test_a_batch_is_the_samples_asked_for(images: ArrayData) -> None:
    batch = read(images, [7, 3, 3, 49])
    assert batch.targets.tolist() == [7, 3, 3, 49]
    assert torch.equal(batch.inputs, images.inputs[[7, 3, 3, 49]])
    assert batch.size == 4


def test_inputs_and_targets_must_agree() -> None:
    with pytest.raises(UsageError, match=r"^3 inputs but 4 targets: each sample needs both$"):
        ArrayData(torch.zeros(3), torch.zeros(4))


def test_every_crop_is_a_window_of_the_padded_image(images: ArrayData) -> None:
    """By search over all windows and both mirrorings: each result is one of them, and they differ."""
    padding = 2
    batch = read(CropAndFlip(images, padding), list(range(50)))
    seen = set()
    for sample in range(50):
        padded = torch.nn.functional.pad(images.inputs[sample], [padding] * 4)
        windows = {
            (down, right, mirrored): padded[:, down : down + 6, right : right + 8]
            for down in range(5)
            for right in range(5)
            for mirrored in (False, True)
        }
        found = [
            place
            for place, window in windows.items()
            if torch.equal(batch.inputs[sample], window.flip(2) if place[2] else window)
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 25


def test_crops_depend_on_seed_epoch_and_sample_only(images: ArrayData) -> None:
    data = CropAndFlip(images, 2)
    whole = read(data, list(range(50)), epoch=1, seed=4).inputs
    assert torch.equal(read(data, [9, 2], epoch=1, seed=4).inputs, whole[[9, 2]])
    assert not torch.equal(read(data, list(range(50)), epoch=2, seed=4).inputs, whole)
    assert not torch.equal(read(data, list(range(50)), epoch=1, seed=5).inputs, whole)
