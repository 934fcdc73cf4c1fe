"""Layers that make results depend on how a batch is divided: batch norms and dropouts, of torch and Keras."""

from __future__ import annotations

from typing import Any

from torch import nn

from manyhands.tasks.keras_model import KerasModule

STATISTICS = ("running_mean", "running_var", "num_batches_tracked", "moving_mean", "moving_variance")
"""How the names of a batch norm's buffers end."""


def batch_norms(model: nn.Module) -> list[Any]:
    """The layers that look at all samples of a micro-batch at a time."""
    found: list[Any] = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return found + [norm for module in _of_keras(model) for norm in module.batch_norms]


def keras_norms(model: nn.Module) -> bool:
    """Whether some of them are Keras's, which compute within one worker only."""
    return any(module.batch_norms for module in _of_keras(model))


def switch_off_dropout(model: nn.Module) -> int:
    """Let no layer drop anything; return how many did."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
    for layer in layers:
        layer.p = 0.0
    recurrent = [m for m in model.modules() if isinstance(m, nn.RNNBase) and m.dropout > 0]
    for network in recurrent:
        network.dropout = 0.0
    others = [layer for module in _of_keras(model) for layer in module.dropouts]
    for other in others:
        other.rate = 0.0
    return len(layers) + len(recurrent) + len(others)


def _of_keras(model: nn.Module) -> list[KerasModule]:
    return [module for module in model.modules() if isinstance(module, KerasModule)]
