"""What a task's options make too large is told before anything of that size is made."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from manyhands.core import environment
from manyhands.core.errors import UsageError
from manyhands.records.spec import RunSpec
from manyhands.runs import resolve
from manyhands.tasks import find
from manyhands.tasks.models.resnet import small_resnet

WIDE = RunSpec.of(task="digits-mlp", options={"width": 1000})


def test_a_model_that_fits_and_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """75,010 parameters and their gradients are 600,080 bytes, twice that in float64."""
    task = find.build("digits-mlp", {"width": 1000})
    monkeypatch.setattr(environment, "memory", lambda: 600_080)
    resolve._check_size(WIDE, task)
    sentence = (
        "with width=1000 has 75,010 parameters: training them takes at least 1.2 MB, and this machine has"
    )
    with pytest.raises(UsageError, match=f"^digits-mlp {sentence} 600 KB$"):
        resolve._check_size(WIDE.replace(dtype="float64"), task)


def test_sizes_that_no_tensor_has() -> None:
    task = find.build("digits-mlp", {})
    beyond = dataclasses.replace(task, model=lambda: nn.Linear(2**40, 2**40))
    with pytest.raises(
        UsageError, match=r"^digits-mlp cannot be built with width=1000: its tensors would be too large$"
    ):
        resolve._check_size(WIDE, beyond)


def test_a_users_model_is_not_built_to_be_measured() -> None:
    def model() -> nn.Module:
        raise AssertionError

    task = dataclasses.replace(find.build("digits-mlp", {}), model=model)
    resolve._check_size(WIDE.replace(task="mine.py:digits"), task)


def test_no_memory_for_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says it in a RuntimeError of its own; any other RuntimeError is the task's."""

    def build(*_: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(find, "build", build)
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"
    sentence = "there is not enough memory for its data"
    with pytest.raises(UsageError, match=rf"^x cannot be built: {sentence} \(tried to allocate 8 bytes\)$"):
        resolve._built("x", {})
    text = "something else"
    with pytest.raises(RuntimeError, match=r"^something else$"):
        resolve._built("x", {})


def test_a_network_too_deep_is_not_begun() -> None:
    """Blocks are made one by one: with 600,000,002 layers until the memory is gone."""
    with pytest.raises(
        UsageError, match=r"^a residual network for small images has at most 6,002 layers, not 6,008$"
    ):
        small_resnet(depth=6_008)
