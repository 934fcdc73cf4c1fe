"""The networks: mnist-mlp's, mnist-cnn's and one of 20 million parameters; a test set too small to matter."""

from __future__ import annotations

from dataclasses import replace

from manyhands import ArrayData, Task
from manyhands.tasks import mnist
from manyhands.tasks.models.mlp import mlp as layers


def mlp() -> Task:
    """784-1024-1024-10: 1,863,690 parameters."""
    return _short(mnist.mnist_mlp())


def cnn() -> Task:
    """Two convolutions: 1,199,882 parameters."""
    return _short(mnist.mnist_cnn())


def big() -> Task:
    """784-4096-4096-10: 20,037,642 parameters, 80 MB of gradients per step."""
    return replace(_short(mnist.mnist_mlp()), name="big", model=lambda: layers([784, 4096, 4096, 10]))


def _short(task: Task) -> Task:
    assert isinstance(task.test, ArrayData)
    return replace(task, test=ArrayData(task.test.inputs[:100], task.test.targets[:100]))
