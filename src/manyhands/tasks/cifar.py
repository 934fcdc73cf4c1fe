"""CIFAR-10 with a residual network: 50,000 training images of 32x32, 10,000 test images."""

from __future__ import annotations

from torch import nn

from manyhands.core.registry import Count
from manyhands.data import sets
from manyhands.data.augment import CropAndFlip
from manyhands.tasks.base import Defaults, Scale, Task
from manyhands.tasks.models.resnet import small_resnet

_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def cifar_resnet(*, depth: int = 20, width: Count = 1, augment: bool = True) -> Task:
    """ResNet-20 (depth 6n + 2), with flips and random crops with 4 pixels of padding."""
    splits = sets.load("cifar-10")
    return Task(
        name="cifar-resnet",
        model=lambda: small_resnet(depth=depth, channels=3, width=width),
        train=CropAndFlip(splits.train, padding=4) if augment else splits.train,
        test=splits.test,
        loss=nn.functional.cross_entropy,
        target=0.90,
        preprocess=Scale(_MEAN, _STD),
        unit="images",
        defaults=Defaults(
            batch=256,
            epochs=60,
            recipe_options={"lr": 0.2, "warmup": 2.0, "decay": "cosine", "weight_decay": 5e-4},
        ),
    )
