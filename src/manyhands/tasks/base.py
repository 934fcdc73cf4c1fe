"""A task: model, data, loss, metric, and the target of "time to target"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manyhands.core.errors import UsageError
from manyhands.data.adapt import as_dataset
from manyhands.data.base import Dataset
from manyhands.data.trees import Tree
from manyhands.tasks import keras_model

Loss = Callable[[Tree, Tree], Any]
"""From outputs and targets to the mean loss of the samples, or to (sum, weight)."""

Data = Any
"""What `as_dataset` accepts: see `Task`."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The quality of a model on the test set: the mean of one score per sample."""

    name: str
    scores: Callable[[Tree, Tree], Tensor]
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


def _correct(outputs: Tree, targets: Tree) -> Tensor:
    check_classes(targets)
    if not isinstance(outputs, Tensor):  # Hugging Face's classifiers return a dict with logits
        outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor):
        raise UsageError(
            f"accuracy needs a tensor of outputs, but the model returns a {_kind(outputs)}: give "
            "the task a Metric of its own"
        )
    found = outputs.argmax(dim=1) if outputs.ndim > 1 else outputs
    if found.shape != targets.shape:
        raise UsageError(
            f"accuracy compares classes of shape {tuple(found.shape)}, the largest of the outputs, with "
            f"targets of shape {tuple(targets.shape)}: for one-hot targets use targets.argmax(1), else give "
            "the task a Metric of its own"
        )
    correct: Tensor = found == targets
    return correct


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

    `model` builds the network from torch's seeded random state. `train` and `test` may be whatever people
    have: a torch Dataset or DataLoader, a Hugging Face Dataset, (inputs, targets) as tensors or numpy arrays,
    or an `mh.Dataset` of your own. `loss(outputs, targets)` is the mean over its samples (torch's default),
    or returns (sum, weight) where the mean is over something else, such as tokens: a global mean can be
    computed from uneven parts of both (law 4). `preprocess` turns the raw inputs of the data set into the
    inputs of the model; serving needs it as well.
    """

    name: str
    model: Callable[[], nn.Module]
    train: Dataset
    test: Dataset
    loss: Loss
    target: float
    metric: Metric = accuracy
    preprocess: nn.Module = field(default_factory=nn.Identity)
    unit: str = "samples"
    evaluation_batch: int = 500
    defaults: Defaults = Defaults()

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            name: str,
            model: Callable[[], nn.Module],
            train: Data,
            test: Data,
            loss: Loss,
            target: float,
            metric: Metric = accuracy,
            preprocess: nn.Module = ...,
            unit: str = "samples",
            evaluation_batch: int = 500,
            defaults: Defaults = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "train", as_dataset(self.train, "train"))
        object.__setattr__(self, "test", as_dataset(self.test, "test"))

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A new model: what `model` returns, with torch modules around Keras models."""
        made: nn.Module = keras_model.build(self.model, self.name, dtype)
        return made
