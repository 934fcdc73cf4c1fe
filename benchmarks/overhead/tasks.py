"""The tasks of this benchmark: MNIST's, with a test set too small to spend time on."""

from dataclasses import replace

from manyhands import ArrayData, Task
from manyhands.tasks import find


def mlp() -> Task:
    """mnist-mlp."""
    return _short(find.build("mnist-mlp", {}))


def cnn() -> Task:
    """mnist-cnn."""
    return _short(find.build("mnist-cnn", {}))


def _short(task: Task) -> Task:
    assert isinstance(task.test, ArrayData)
    return replace(task, test=ArrayData(task.test.inputs[:100], task.test.targets[:100]))
