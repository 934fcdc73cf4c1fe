"""What is said of a run whose numbers are none, and which way its metric counts: no guessing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import manyhands as mh
from conftest import Answer
from manyhands.core.errors import DivergedError

FILE = """
import math
import torch, manyhands as mh
from torch import nn
from torch.nn import functional as F

generator = torch.Generator().manual_seed(0)

def task(*, train=None, test=None, value=math.nan, where="inputs", loss=F.mse_loss, **metric) -> mh.Task:
    sets = []
    for broken in (train, test):
        inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
        targets = inputs.sum(1, keepdim=True)
        if broken is not None:
            (inputs if where == "inputs" else targets)[broken] = value
        sets.append(mh.ArrayData(inputs, targets))
    named = dict(name="mse", scores=lambda o, t: (o - t).square().mean(1), higher_is_better=False)
    defaults = mh.Defaults(batch=8, epochs=2, recipe="constant", recipe_options={"lr": 0.05})
    return mh.Task(
        name="mine", model=lambda: nn.Linear(3, 1), train=sets[0], test=sets[1], loss=loss, target=0.5,
        metric=mh.Metric(**{**named, **metric}), defaults=defaults,
    )

def fine() -> mh.Task:
    return task()

def upwards() -> mh.Task:
    return task(name="error avoided", higher_is_better=True)

def nan_input() -> mh.Task:
    return task(train=17)

def infinite_target() -> mh.Task:
    return task(train=3, value=math.inf, where="targets")

def nan_test() -> mh.Task:
    return task(test=5)

def broken_loss() -> mh.Task:
    return task(loss=lambda o, t: F.mse_loss(o, t) / 0.0)

def nan_metric() -> mh.Task:
    return task(name="odd", scores=lambda o, t: o[:, 0] * math.nan)

def late_metric() -> mh.Task:
    calls = []
    def scores(o, t):
        calls.append(1)
        return o[:, 0] * 0.0 + (math.nan if len(calls) == 1 else 0.25)
    return task(name="odd", scores=scores)
"""


@pytest.fixture
def mine(here: Path) -> Path:
    (here / "mine.py").write_text(FILE)
    return here


def test_which_way_a_metric_counts_is_in_the_record(mine: Path) -> None:
    assert mh.train("mine.py:fine", out="run", quiet=True).higher_is_better is False
    record = mh.load("run")
    assert record.higher_is_better is False
    assert record.reached
    assert mh.train("mine.py:upwards", quiet=True).higher_is_better is True


@pytest.mark.parametrize("more", [{}, {"strategy": "hogwild"}, {"strategy": "average"}])
def test_a_sample_that_is_no_number_is_named(more: dict, mine: Path) -> None:
    """The advice was a smaller rate, at the first step."""
    with pytest.raises(
        DivergedError, match=r"^the loss became nan .*: sample 17 of the training set holds NaN in"
    ):
        mh.train("mine.py:nan_input", quiet=True, **more)
    with pytest.raises(DivergedError, match=r": sample 3 of the training set holds infinity in its targets$"):
        mh.train("mine.py:infinite_target", quiet=True, **more)


def test_a_loss_that_was_never_a_number_is_not_blamed_on_the_rate(mine: Path) -> None:
    with pytest.raises(
        DivergedError,
        match=r"^the loss became inf at step 1 \(8 samples seen\), before any update, and no sample",
    ):
        mh.train("mine.py:broken_loss", quiet=True)


def test_a_metric_that_is_no_number_is_named_while_it_runs_and_at_its_end(
    mine: Path, typed: Callable[..., Answer]
) -> None:
    """It was `finished`, without a word."""
    found = typed("train", "mine.py:nan_metric", "--out", "run", cwd=mine)
    assert found.code == 0
    said = (
        "the metric odd is nan at step 5: no sample of the test set is to blame: look at the model's outputs"
    )
    assert found.err.count(said) == 1
    assert "did not reach 0.5 · the metric odd is not a number · " in found.err
    record = mh.load(mine / "run")
    assert (record.metric, record.best_metric, record.message) == (
        None,
        None,
        "the metric odd is not a number",
    )
    assert "finished; the metric odd is not a number" in typed("show", "run", cwd=mine).out


def test_a_test_sample_that_is_no_number_is_named(mine: Path, typed: Callable[..., Answer]) -> None:
    found = typed("train", "mine.py:nan_test", cwd=mine)
    assert "the metric mse is nan at step 5: sample 5 of the test set holds NaN in its inputs" in found.err


def test_a_metric_that_becomes_a_number_has_a_best_value(mine: Path) -> None:
    """The first NaN stayed the best for ever: nothing compares with it."""
    record = mh.train("mine.py:late_metric", quiet=True)
    assert (record.metric, record.best_metric, record.message) == (0.25, 0.25, None)
    assert record.reached
