"""From a raw batch of the data set to what a task's model and loss take."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.data import trees
from manyhands.data.base import Batch
from manyhands.tasks.base import Task


def prepare(task: Task, batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """Move a batch to the device while its inputs are still bytes, then preprocess and convert it.

    Whatever is floating-point gets the dtype of the run: numpy's float64 must not meet a float32 model.
    """

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    def converted(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    inputs = task.preprocess(trees.mapped(converted, trees.mapped(moved, batch.inputs)))
    targets = trees.mapped(converted, trees.mapped(moved, batch.targets))
    return Batch(trees.mapped(converted, inputs), targets)
