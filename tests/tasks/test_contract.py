"""What a task promises and does not keep is said in a sentence: it trained, and the numbers were wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import manyhands as mh
from conftest import Answer
from manyhands.core.errors import UsageError

FILE = """
import torch, manyhands as mh
from torch import nn
from torch.nn import functional as F

inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
whole = (inputs.sum(1) > 0).long()

def data(targets, n=40):
    return mh.ArrayData(inputs[:n], targets[:n])

def task(*, targets=whole, train=40, test=40, model=lambda: nn.Linear(4, 2), loss=F.cross_entropy, **more):
    sets = dict(train=data(targets, train), test=data(targets, test))
    defaults = mh.Defaults(batch=8, epochs=2, recipe="constant", recipe_options={"lr": 0.1})
    return mh.Task(name="mine", model=model, loss=loss, target=0.9, defaults=defaults, **sets, **more)

def column() -> mh.Task:
    return task(targets=whole[:, None], loss=lambda o, t: F.cross_entropy(o, t.squeeze(1)))

def regression() -> mh.Task:
    return task(targets=inputs.sum(1), loss=lambda o, t: F.mse_loss(o[:, 0], t))

def summed() -> mh.Task:
    return task(loss=nn.CrossEntropyLoss(reduction="sum"))

def no_training() -> mh.Task:
    return task(train=0)

def no_test() -> mh.Task:
    return task(test=0)

def flat_scores() -> mh.Task:
    return task(metric=mh.Metric(name="likes", scores=lambda o, t: (o.argmax(1) == t).float().mean()))

def wide_scores() -> mh.Task:
    return task(metric=mh.Metric(name="likes", scores=lambda o, t: o == t[:, None]))

def two_outputs() -> mh.Task:
    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x), x
    return task(model=lambda: Two(4, 2), loss=lambda o, t: F.cross_entropy(o[0], t))

class Waves(nn.Linear):
    def __init__(self, kind):
        super().__init__(4, 2)
        wave = torch.ones(3, dtype=torch.complex64) * 1j
        if kind == "parameter":
            self.wave = nn.Parameter(wave)
        else:
            self.register_buffer("wave", wave)

def complex_parameter() -> mh.Task:
    return task(model=lambda: Waves("parameter"))

def complex_buffer() -> mh.Task:
    return task(model=lambda: Waves("buffer"))

def complex_preprocessing() -> mh.Task:
    return task(preprocess=Waves("buffer"))

def kept_view() -> mh.Task:
    class Keeps(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.turned = self.weight.t()
        def forward(self, x):
            return x @ self.turned
    return task(model=Keeps)

def fine() -> mh.Task:
    return task()
"""

SENTENCES = {
    "column": "accuracy needs one class index per sample, but the targets have shape (n, 1), not (n,): use "
    "targets.squeeze(1)",
    "regression": "accuracy needs class indices, but the targets are float32: for classes use "
    "targets.long(), for regression give the task a Metric of its own, such as the squared error of each "
    "sample",
    "no_training": "the training set of mine is empty: it needs at least one sample",
    "no_test": "the test set of mine is empty: it needs at least one sample",
    "flat_scores": "the metric likes must return one score per sample, shape (8,) for 8 samples, but "
    "returned shape (): if a sample has several values, return their mean per sample",
    "wide_scores": "the metric likes must return one score per sample, shape (8,) for 8 samples, but "
    "returned shape (8, 2): if a sample has several values, return their mean per sample",
    "two_outputs": "accuracy needs a tensor of outputs, but the model returns a tuple: give the "
    "task a Metric of its own",
    "complex_parameter": "the parameter wave of the model of mine is complex64, but complex tensors cannot "
    "be trained or saved: store its torch.view_as_real, and use torch.view_as_complex in forward",
    "complex_buffer": "the buffer wave of the model of mine is complex64, but complex tensors cannot be "
    "trained or saved: store its torch.view_as_real, and use torch.view_as_complex in forward",
    "complex_preprocessing": "the buffer wave of the preprocessing of mine is complex64, but complex tensors "
    "cannot be trained or saved: store its torch.view_as_real, and use torch.view_as_complex in forward",
}


@pytest.fixture
def mine(here: Path) -> Path:
    (here / "mine.py").write_text(FILE)
    return here


@pytest.mark.parametrize("name", SENTENCES)
def test_a_broken_promise_is_a_sentence(name: str, mine: Path, typed: Callable[..., Answer]) -> None:
    found = typed("train", f"mine.py:{name}", "--quiet", cwd=mine)
    assert (found.code, found.err) == (2, f"error: {SENTENCES[name]}\n")


def test_a_loss_that_is_a_sum_is_refused_at_the_first_batch(mine: Path, typed: Callable[..., Answer]) -> None:
    found = typed("train", "mine.py:summed", "--quiet", "--out", "run", cwd=mine)
    assert found.code == 2
    assert found.err.startswith("error: the loss is not the mean over its samples: it is ")
    assert not (mine / "run/steps.jsonl").exists() or not (mine / "run/steps.jsonl").read_text()


def test_what_is_kept_trains(mine: Path) -> None:
    assert mh.train("mine.py:fine", quiet=True).status == "finished"


@pytest.mark.parametrize("name", ["summed", "complex_parameter", "column"])
def test_verify_refuses_it_too(name: str, mine: Path, typed: Callable[..., Answer]) -> None:
    """It compared what was cast with what was cast, and found both equal."""
    found = typed("verify", f"mine.py:{name}", "--batch", "8", "--workers", "1", "--steps", "1", cwd=mine)
    assert found.code == 2, found.err
    assert "Traceback" not in found.err


@pytest.mark.parametrize("strategy", ["pipeline", "server"])
def test_with_two_workers_as_well(strategy: str, mine: Path, typed: Callable[..., Answer]) -> None:
    """The last stage has the loss, a server has none."""
    two = "nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))"
    (mine / "mine.py").write_text(FILE.replace("nn.Linear(4, 2)", two))
    words = ("--workers", "2", "--strategy", strategy, "--quiet")
    micro = ("--micro-batches", "2") if strategy == "pipeline" else ()
    found = typed("train", "mine.py:summed", *words, *micro, cwd=mine)
    assert found.code == 2, found.err
    assert found.err.splitlines()[0].startswith("error: the loss is not the mean over its samples")


def test_a_view_of_a_parameter_is_refused_where_parameters_move(
    mine: Path, typed: Callable[..., Answer]
) -> None:
    """The model went on with the values of the beginning; only one worker trains it."""
    found = typed("train", "mine.py:kept_view", "--strategy", "allreduce", "--quiet", cwd=mine)
    assert found.code == 2
    assert found.err.startswith("error: turned lies in the memory of the parameter weight (such as .data")
    assert typed("train", "mine.py:kept_view", "--quiet", cwd=mine).code == 0


def test_scores_of_every_batch_are_looked_at() -> None:
    from manyhands.tasks.contract import scored

    metric = mh.Metric(name="m", scores=lambda outputs, targets: outputs)
    assert scored(metric, torch.zeros(3), torch.zeros(3), 3).shape == (3,)
    with pytest.raises(UsageError, match=r"^the metric m must return .* returned shape \(3, 1\)"):
        scored(metric, torch.zeros(3, 1), torch.zeros(3), 3)
    with pytest.raises(UsageError, match=r"returned a float"):
        scored(mh.Metric(name="m", scores=lambda o, t: 0.5), torch.zeros(3), torch.zeros(3), 3)  # type: ignore[arg-type, return-value]


def test_real_numbers_of_any_kind_pass() -> None:
    from manyhands.tasks.contract import check_real

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("whole", torch.arange(3))
    check_real(model, "x")
