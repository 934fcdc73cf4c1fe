"""Fully connected networks."""

from __future__ import annotations

from itertools import pairwise

from torch import nn


def mlp(widths: list[int]) -> nn.Sequential:
    """Linear layers of these widths with a rectifier between them; the input is flattened."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
