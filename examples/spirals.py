"""A task of your own: manyhands train examples/spirals.py:spirals --set turns=2"""

import math

import torch
from torch import nn

import manyhands as mh


def points(n: int, turns: float, seed: int) -> mh.ArrayData:
    """Two arms that wind around each other; the class of a point is its arm."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(0, 2, (n,), generator=generator)
    radius = torch.rand(n, generator=generator).sqrt()
    angle = 2 * math.pi * turns * radius + math.pi * arm
    place = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return mh.ArrayData(place + 0.02 * torch.randn(n, 2, generator=generator), arm)


def network() -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def spirals(*, turns: float = 1.0, n: int = 4000) -> mh.Task:
    """Tell two spirals apart."""
    return mh.Task(
        name="spirals",
        model=network,
        train=points(n, turns, seed=1),
        test=points(1000, turns, seed=2),
        loss=nn.functional.cross_entropy,
        target=0.98,
        defaults=mh.Defaults(batch=64, epochs=30, recipe_options={"lr": 0.4, "decay": "cosine"}),
    )
