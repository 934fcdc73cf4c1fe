"""A task whose gradients overflow in float16 at the usual scale, and one whose gradients always do."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import manyhands as mh


def _task(factor: float) -> mh.Task:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(96, 12, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) * factor

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))

    return mh.Task(name="steep", model=model, train=(x, y), test=(x, y), loss=loss, target=0.99)


def steep() -> mh.Task:
    return _task(30.0)


def hopeless() -> mh.Task:
    return _task(1e12)
