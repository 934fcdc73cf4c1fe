"""A task: model, data, loss, metric, and the target of "time to target"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core.errors import UsageError
from manyhands.data.base import Dataset


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The quality of a model on the test set: the mean of one score per sample."""

    name: str
    scores: Callable[[Tensor, Tensor], Tensor]
    higher_is_better: bool = True

    def reached(self, value: float, target: float) -> bool:
        """Whether a value is at least as good as the target."""
        return value >= target if self.higher_is_better else value <= target


def check_classes(targets: object) -> None:
    """Refuse targets that accuracy cannot use: it needs one class index per sample."""
    instead = "give the task a Metric of its own, such as the squared error of each sample"
    if not isinstance(targets, Tensor):
        raise UsageError(f"accuracy needs class indices, but the targets are a {_kind(targets)}: {instead}")
    if targets.is_floating_point() or targets.is_complex():
        dtype = str(targets.dtype).removeprefix("torch.")
        raise UsageError(
            f"accuracy needs class indices, but the targets are {dtype}: for classes use targets.long(), "
            f"for regression {instead}"
        )
    if targets.ndim == 2 and targets.shape[1] == 1:
        raise UsageError(
            "accuracy needs one class index per sample, but the targets have shape (n, 1), not (n,): use "
            "targets.squeeze(1)"
        )


def _correct(outputs: Tensor, targets: Tensor) -> Tensor:
    check_classes(targets)
    if not isinstance(outputs, Tensor):
        raise UsageError(
            f"accuracy needs a tensor of outputs, but the model returns a {_kind(outputs)}: give "
            "the task a Metric of its own"
        )
    return outputs.argmax(dim=1) == targets


def _kind(value: object) -> str:
    return type(value).__name__


accuracy = Metric(name="accuracy", scores=_correct)


class Scale(nn.Module):
    """Normalize pixels 0..255: (x / 255 - mean) / std, for all pixels or per channel."""

    def __init__(self, mean: float | tuple[float, ...], std: float | tuple[float, ...]) -> None:
        super().__init__()
        shift, width = torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
        if shift.ndim:
            shift, width = shift[:, None, None], width[:, None, None]
        # (x / 255 - mean) / std as one multiplication and one addition
        self.register_buffer("factor", 1.0 / (255.0 * width))
        self.register_buffer("offset", -shift / width)

    factor: Tensor
    offset: Tensor

    def forward(self, pixels: Tensor) -> Tensor:
        """Scale a batch. The result has the dtype of this module."""
        # three times as fast as `addcmul`, which does not vectorize over a broadcast
        return (pixels.to(self.factor.dtype) * self.factor).add_(self.offset)


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a run of this task uses by default."""

    batch: int = 256
    epochs: float = 3
    recipe: str = "large-batch"
    recipe_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything about a learning problem that does not depend on the workers.

    `model` builds the network from torch's seeded random state. `loss` is the mean over its samples (torch's
    default), so that a global mean can be computed from uneven parts (law 4). `preprocess` turns the raw
    inputs of the data set into the inputs of the model; serving needs it as well.
    """

    name: str
    model: Callable[[], nn.Module]
    train: Dataset
    test: Dataset
    loss: Callable[[Tensor, Tensor], Tensor]
    target: float
    metric: Metric = accuracy
    preprocess: nn.Module = field(default_factory=nn.Identity)
    unit: str = "samples"
    evaluation_batch: int = 500
    defaults: Defaults = Defaults()
