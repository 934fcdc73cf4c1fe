"""A quadratic function whose minimum and every SGD step are known in closed form, for tests.

Sample i pulls the parameters w towards a point a_i with the stiffness h of each coordinate:

    loss_i(w) = 1/2 sum_j h_j (w_j - a_ij)^2   so   w* = mean of a_i,   a batch's gradient = h (w - mean a_i)
"""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge
from torch import Tensor, nn

from manyhands.core.registry import Count
from manyhands.data.arrays import ArrayData
from manyhands.data.order import key
from manyhands.tasks.base import Defaults, Metric, Task

Array = npt.NDArray[np.float64]


class Displacement(nn.Module):
    """The parameters minus a sample."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dimensions))

    def forward(self, points: Tensor) -> Tensor:
        return self.weight - points


def points(n: int, dimensions: int) -> Array:
    """The samples a_i: a function of their number and dimensions."""
    generator = np.random.Generator(np.random.Philox(key=key(n, dimensions)))
    return 1.0 + generator.standard_normal((n, dimensions))


def stiffness(dimensions: int, condition: float) -> Array:
    """h_j from 1/condition to 1, spaced evenly in the logarithm."""
    return np.logspace(-math.log10(condition), 0.0, dimensions)


def sgd_iterates(batches: list[Array], h: Array, lrs: list[float], momentum: float = 0.0) -> list[Array]:
    """The parameters after each step of SGD from zero, computed without torch."""
    w, v, path = np.zeros_like(h), np.zeros_like(h), []
    for batch, lr in zip(batches, lrs, strict=True):
        v = momentum * v + h * (w - batch.mean(axis=0))
        w = w - lr * v
        path.append(w)
    return path


def quadratic(*, n: Count = 1000, dimensions: Count = 10, condition: Annotated[float, Ge(1)] = 10.0) -> Task:
    """A quadratic bowl over n random points: its minimizer is their mean."""
    samples = torch.from_numpy(points(n, dimensions))
    h = torch.from_numpy(stiffness(dimensions, condition))
    best = samples.mean(dim=0)

    def loss(displacement: Tensor, _: Tensor) -> Tensor:
        return 0.5 * (h.to(displacement) * displacement.square()).sum(dim=1).mean()

    def excess(displacement: Tensor, own: Tensor) -> Tensor:
        # loss_i(w) - loss_i(w*); its mean over all samples is 1/2 (w - w*)^T h (w - w*)
        least = 0.5 * (h * (best - samples[own.cpu()]).square()).sum(dim=1)
        return 0.5 * (h * displacement.double().cpu().square()).sum(dim=1) - least

    data = ArrayData(samples, torch.arange(n))
    return Task(
        name="quadratic",
        model=lambda: Displacement(dimensions),
        train=data,
        test=data,
        loss=loss,
        metric=Metric(name="excess loss", scores=excess, higher_is_better=False),
        target=1e-3,
        defaults=Defaults(batch=100, epochs=20, recipe="constant", recipe_options={"lr": 0.2}),
    )
