"""The handwritten digits of scikit-learn: real data without a download."""

from __future__ import annotations

import torch
from torch import nn

from manyhands.core.registry import Count
from manyhands.data.arrays import ArrayData
from manyhands.data.order import shuffle
from manyhands.tasks.base import Defaults, Scale, Task
from manyhands.tasks.models.mlp import mlp


def digits_mlp(*, width: Count = 64) -> Task:
    """1,797 images of 8x8 pixels, a fifth of them for testing; one hidden layer."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy((images * (255 / 16)).astype("uint8")).reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(labels).long()
    chosen = torch.tensor(shuffle(len(labels), seed=0, epoch=0))
    test, train = chosen[:360], chosen[360:]
    return Task(
        name="digits-mlp",
        model=lambda: mlp([64, width, 10]),
        train=ArrayData(inputs[train], targets[train]),
        test=ArrayData(inputs[test], targets[test]),
        loss=nn.functional.cross_entropy,
        target=0.96,
        preprocess=Scale(0.3, 0.38),
        unit="images",
        defaults=Defaults(batch=64, epochs=20, recipe_options={"lr": 0.4, "warmup": 1.0, "decay": "cosine"}),
    )
