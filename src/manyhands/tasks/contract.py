"""What a task promises of its data, scores and tensors, checked: broken, it is wrong without a word."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
from torch import Tensor, nn

from manyhands.core.errors import UsageError
from manyhands.data.base import Batch, Dataset, Request
from manyhands.tasks.base import Metric, Task, accuracy, check_classes


def check_sizes(task: Task) -> None:
    """Say of a data set that it is empty."""
    for name, data in (("training", task.train), ("test", task.test)):
        if not len(data):
            raise UsageError(f"the {name} set of {task.name} is empty: it needs at least one sample")


def check_targets(task: Task) -> None:
    """Say before the first step, not at the first evaluation, that accuracy has no use for the targets."""
    if task.metric.scores is accuracy.scores:
        check_classes(_first(task.test).targets)


def _first(data: Dataset) -> Batch:
    with closing(data.stream([Request(0, np.zeros(1, dtype=np.int64))], seed=0)) as stream:
        return next(stream)


def scored(metric: Metric, outputs: Any, targets: Any, size: int) -> Tensor:
    """The scores of a batch, of which there must be one per sample."""
    scores = metric.scores(outputs, targets)
    if isinstance(scores, Tensor) and scores.shape == (size,):
        return scores
    tensor = isinstance(scores, Tensor)
    found = f"shape {tuple(scores.shape)}" if tensor else f"a {type(scores).__name__}"
    raise UsageError(
        f"the metric {metric.name} must give one score per sample, shape ({size},) for {size} samples, and "
        f"gave {found}: where a sample has several numbers take their mean, and none over the samples"
    )


def check_real(module: nn.Module, whose: str) -> None:
    """Refuse complex numbers: a change of type to a real one drops their imaginary part in silence."""
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            if tensor.is_complex():
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise UsageError(
                    f"the {kind} {name} of {whose} is {dtype}, and complex tensors are not trained or saved: "
                    "keep its torch.view_as_real, and use torch.view_as_complex in forward"
                )
