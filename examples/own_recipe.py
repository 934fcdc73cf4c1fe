"""An optimizer and a schedule of one's own: manyhands train digits-mlp --recipe examples/own_recipe.py:muon

A recipe is a function of the named parameters and the samples per update. It may return several optimizers.
"""

import math

import torch
from torch import nn
from torch.optim import Optimizer


def muon(
    named_parameters: list[tuple[str, nn.Parameter]], batch: int, decay: float = 0.01
) -> list[Optimizer]:
    """Muon for matrices, AdamW for the rest; an option, `--set recipe.decay=0.1`."""
    matrices = [p for _, p in named_parameters if p.ndim == 2]
    others = [p for _, p in named_parameters if p.ndim != 2]
    lr = 0.02 * math.sqrt(batch / 64)
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=decay),
        torch.optim.AdamW(others, lr=lr / 10, weight_decay=decay),
    ]


def warm(samples: int) -> float:
    """The learning rate after so many samples: it rises for 5,000, then falls slowly."""
    return 0.02 * min(1.0, samples / 5000 + 0.01) / (1 + samples / 20000)
