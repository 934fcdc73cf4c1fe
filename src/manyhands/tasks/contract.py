"""Checks of what a task must guarantee for its data, scores and tensors."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
from torch import Tensor, nn

from manyhands.core.errors import UsageError, kind_of
from manyhands.data.base import Batch, Dataset, Request
from manyhands.tasks.base import Metric, Task, accuracy, check_classes


def check_sizes(task: Task) -> None:
    """Refuse an empty data set."""
    for name, data in (("training", task.train), ("test", task.test)):
        if not len(data):
            raise UsageError(f"the {name} set of {task.name} is empty: it needs at least one sample")


def check_targets(task: Task) -> None:
    """Refuse targets that accuracy cannot use, before the first step instead of at the first evaluation."""
    if task.metric.scores is accuracy.scores:
        check_classes(_first(task.test).targets)


def _first(data: Dataset) -> Batch:
    with closing(data.stream([Request(0, np.zeros(1, dtype=np.int64))], seed=0)) as stream:
        return next(stream)


def scored(metric: Metric, outputs: Any, targets: Any, size: int) -> Tensor:
    """The scores of a batch: exactly one per sample."""
    scores = metric.scores(outputs, targets)
    if isinstance(scores, Tensor) and scores.shape == (size,):
        return scores
    tensor = isinstance(scores, Tensor)
    found = f"shape {tuple(scores.shape)}" if tensor else f"{kind_of(scores)}"
    raise UsageError(
        f"the metric {metric.name} must return one score per sample, shape ({size},) for {size} samples, but "
        f"returned {found}: if a sample has several values, return their mean per sample"
    )


def check_real(module: nn.Module, whose: str) -> None:
    """Refuse complex tensors: a cast to a real dtype would silently drop their imaginary part."""
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            if tensor.is_complex():
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise UsageError(
                    f"the {kind} {name} of {whose} is {dtype}, but complex tensors cannot be trained or "
                    "saved: store its torch.view_as_real, and use torch.view_as_complex in forward"
                )
