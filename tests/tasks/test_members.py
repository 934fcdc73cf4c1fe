"""Every task passes the conformance suite: one class each, on real data where it can be had."""

from __future__ import annotations

from typing import ClassVar

import pytest

from conftest import SHARED
from manyhands.core.errors import DataUnavailableError
from manyhands.tasks import TASKS, find
from manyhands.tasks.base import Task
from manyhands.testing.tasks import TaskSuite

BLOOD = SHARED / "data/blood-cells"


class _Suite(TaskSuite):
    name: ClassVar[str]
    options: ClassVar[dict[str, object]] = {}

    @pytest.fixture(autouse=True)
    def _task(self) -> None:
        try:
            type(self).task = find.build(self.name, self.options)
        except DataUnavailableError as error:
            pytest.skip(str(error))


class TestSparse(_Suite):
    name = "sparse-logistic"


class TestQuadratic(_Suite):
    name = "quadratic"


class TestDigits(_Suite):
    name = "digits-mlp"


class TestMnistMlp(_Suite):
    name = "mnist-mlp"


class TestMnistCnn(_Suite):
    name = "mnist-cnn"


class TestMnistResnet(_Suite):
    name = "mnist-resnet"


@pytest.mark.slow
class TestFashion(_Suite):
    name = "fashion-cnn"
    options: ClassVar[dict[str, object]] = {"dropout": 0.0}


@pytest.mark.slow
class TestFashionResnet(_Suite):
    name = "fashion-resnet"
    options: ClassVar[dict[str, object]] = {"stride": 2}


@pytest.mark.slow
class TestCifar(_Suite):
    name = "cifar-resnet"


@pytest.mark.skipif(not BLOOD.is_dir(), reason=f"the blood cells are not at {BLOOD}")
class TestBlood(_Suite):
    name = "blood-vgg19"
    options: ClassVar[dict[str, object]] = {"data": str(BLOOD), "size": 32, "hidden": 64, "dropout": 0.0}


@pytest.mark.slow
@pytest.mark.skipif(not BLOOD.is_dir(), reason=f"the blood cells are not at {BLOOD}")
class TestImagenet(_Suite):
    """ImageNet itself cannot be had here; any image folder has its layout."""

    name = "imagenet-resnet50"
    options: ClassVar[dict[str, object]] = {"data": str(BLOOD), "size": 64}


def test_every_task_has_a_class_here() -> None:
    assert {suite.name for suite in _Suite.__subclasses__()} == set(TASKS)


def test_the_parameters_that_the_issue_names() -> None:
    counts = {}
    for name in ("mnist-mlp", "mnist-cnn"):
        try:
            task: Task = find.build(name, {})
        except DataUnavailableError as error:
            pytest.skip(str(error))
        counts[name] = sum(parameter.numel() for parameter in task.model().parameters())
    assert counts == {"mnist-mlp": 1_863_690, "mnist-cnn": 1_199_882}
