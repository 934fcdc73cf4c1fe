"""The small convolutional network of the MNIST-like tasks."""

from __future__ import annotations

from torch import nn


def cnn(classes: int = 10, width: float = 1.0, dropout: float = 0.0) -> nn.Sequential:
    """Two 3x3 convolutions (32, 64), a pool, 128 hidden units: 1,199,882 parameters at width 1 for 28x28."""
    first, second, hidden = (max(1, round(width * channels)) for channels in (32, 64, 128))
    return nn.Sequential(
        nn.Conv2d(1, first, 3),
        nn.ReLU(),
        nn.Conv2d(first, second, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(second * 12 * 12, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, classes),
    )
