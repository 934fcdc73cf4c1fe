"""The networks of the benchmark: a wide MLP and a convolutional network of equal blocks, on random data."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

import manyhands as mh

WIDTH, LAYERS, CHANNELS, CONVOLUTIONS, PIXELS = 1024, 6, 32, 8, 32


def wide() -> nn.Sequential:
    """Six linear layers of 1024 x 1024: 6.3 M parameters."""
    layers = [
        nn.Sequential(nn.Linear(a, b), nn.ReLU() if number < LAYERS - 1 else nn.Identity())
        for number, (a, b) in enumerate(pairwise([WIDTH] * (LAYERS + 1)))
    ]
    return nn.Sequential(*layers)


def convolutional() -> nn.Sequential:
    """Eight 3x3 convolutions of 32 channels on 32 x 32 pixels, behind a stem and before a classifier."""

    def block(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, CHANNELS, 3, padding=1), nn.ReLU())

    head = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * CHANNELS, 10))
    return nn.Sequential(block(3), *(block(CHANNELS) for _ in range(CONVOLUTIONS)), head)


def mlp() -> mh.Task:
    """Batch 1024."""
    return _task("mlp", wide, (WIDTH,), WIDTH, 8 * 1024)


def cnn() -> mh.Task:
    """Batch 64."""
    return _task("cnn", convolutional, (3, PIXELS, PIXELS), 10, 8 * 64)


def _task(name: str, model: object, shape: tuple[int, ...], classes: int, samples: int) -> mh.Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, *shape, generator=generator)
    targets = torch.randint(0, classes, (samples,), generator=generator)
    data = mh.ArrayData(inputs, targets)
    few = mh.ArrayData(inputs[:8], targets[:8])
    return mh.Task(
        name=name,
        model=model,  # type: ignore[arg-type]
        train=data,
        test=few,
        loss=nn.functional.cross_entropy,
        target=2.0,  # never reached
    )
