"""A task says what is learned: model, data, loss, metric and the target that "time to target" means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.data.base import Dataset


@dataclass(frozen=True, kw_only=True)
class Metric:
    """How good a model is on the test set: the mean of a score a sample."""

    name: str
    scores: Callable[[Tensor, Tensor], Tensor]
    higher_is_better: bool = True

    def reached(self, value: float, target: float) -> bool:
        """Whether a value is as good as the target or better."""
        return value >= target if self.higher_is_better else value <= target


def _correct(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.argmax(dim=1) == targets


accuracy = Metric(name="accuracy", scores=_correct)


class Scale(nn.Module):
    """Pixels 0..255 to numbers around zero: (x / 255 - mean) / std, for all pixels or a channel."""

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
        """Scale a batch; the result has the dtype this module was moved to."""
        # three times as fast as `addcmul`, which does not vectorise over a broadcast
        return (pixels.to(self.factor.dtype) * self.factor).add_(self.offset)


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a run of this task uses where the user names nothing."""

    batch: int = 256
    epochs: float = 3
    recipe: str = "large-batch"
    recipe_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything about a learning problem that does not depend on who does the work.

    `model` builds the network from torch's seeded random state. `loss` is the mean over the samples it is
    given (torch's own default), so that a global mean can be put together from uneven parts (law 4).
    `preprocess` turns raw inputs, as data sets hold them, into the model's; serving needs it as well.
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
