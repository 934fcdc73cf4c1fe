"""The tasks on MNIST and Fashion-MNIST: 60,000 training images of 28x28, 10,000 test images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from manyhands.core.registry import Count, Fraction, Positive
from manyhands.data import sets
from manyhands.tasks.base import Defaults, Scale, Task
from manyhands.tasks.models.cnn import cnn
from manyhands.tasks.models.mlp import mlp
from manyhands.tasks.models.resnet import small_resnet

# mean and standard deviation of the training pixels, as fractions of 255
_SCALES = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}


def mnist_mlp(*, width: Count = 1024) -> Task:
    """784-1024-1024-10 (1,863,690 parameters)."""
    return _task("mnist-mlp", "mnist", lambda: mlp([784, width, width, 10]), target=0.97, lr=0.05)


def mnist_cnn(*, width: Positive = 1.0, dropout: Fraction = 0.0) -> Task:
    """Two 3x3 convolutions 32/64, a pool, 128, 10 (1,199,882 parameters)."""
    return _task("mnist-cnn", "mnist", lambda: cnn(10, width, dropout), target=0.985, lr=0.05)


def mnist_resnet(*, depth: int = 8, width: Count = 1) -> Task:
    """A small residual network with batch norm, of depth 6n + 2."""
    return _task(
        "mnist-resnet",
        "mnist",
        lambda: small_resnet(depth=depth, channels=1, width=width),
        target=0.985,
        lr=0.4,
    )


def fashion_cnn(*, width: Positive = 1.0, dropout: Fraction = 0.25) -> Task:
    """The network of mnist-cnn on images of clothes."""
    return _task(
        "fashion-cnn", "fashion-mnist", lambda: cnn(10, width, dropout), target=0.91, lr=0.05, epochs=8
    )


def fashion_resnet(*, depth: int = 8, width: Count = 1, stride: Count = 1) -> Task:
    """The network of mnist-resnet on images of clothes; `stride` is that of its first convolution."""
    return _task(
        "fashion-resnet",
        "fashion-mnist",
        lambda: small_resnet(depth=depth, channels=1, width=width, stride=stride),
        target=0.91,
        lr=0.4,
        epochs=8,
    )


def _task(
    name: str, data: str, model: Callable[[], nn.Module], *, target: float, lr: float, epochs: float = 3
) -> Task:
    splits = sets.load(data)
    recipe: dict[str, Any] = {"lr": lr, "warmup": 1.0, "decay": "cosine"}
    return Task(
        name=name,
        model=model,
        train=splits.train,
        test=splits.test,
        loss=nn.functional.cross_entropy,
        target=target,
        preprocess=Scale(*_SCALES[data]),
        unit="images",
        defaults=Defaults(batch=256, epochs=epochs, recipe_options=recipe),
    )
