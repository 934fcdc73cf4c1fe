"""A task is examined before the first step: a fault is one sentence, and nothing is changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import manyhands as mh
from bring.rows import ROWS, Squares, Unused, net, numbers, task
from conftest import Answer
from manyhands.core.errors import UsageError
from manyhands.tasks.examine import Examination, examine

CPU = torch.device("cpu")


def look(brought: mh.Task) -> Examination:
    return examine(brought, CPU, torch.float32)


class Own(Dataset[Any]):
    """Draws from a generator of its own: every reading differs."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.generator.random(6, dtype=np.float32), 0


class Wrong(mh.ArrayData):
    """Yields something else than batches."""

    def stream(self, requests: Any, seed: int) -> Any:
        for request in requests:
            yield self.inputs[request.samples.copy()], self.targets


class TooMany(mh.ArrayData):
    """All targets for every request."""

    def stream(self, requests: Any, seed: int) -> Any:
        for request in requests:
            yield mh.Batch(self.inputs[request.samples.copy()], self.targets)


class Broken(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("weight")


class WithLoss(nn.Module):
    """Returns a scalar beside its outputs: a sum over samples, or a mean."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.reduce = net(), reduce

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = self.inner(x)
        return {"outputs": outputs, "aux": self.reduce(outputs.square())}


def with_scalar(reduce: Callable[[Tensor], Tensor], used: float = 1.0) -> mh.Task:
    return task(
        (X, Y),
        model=lambda: WithLoss(reduce),
        loss=lambda o, t: cross_entropy(o["outputs"], t) + used * o["aux"],
        metric=mh.Metric(name="right", scores=lambda o, t: (o["outputs"].argmax(1) == t).float()),
    )


class Counts(nn.Module):
    """Changes a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(net(), nn.BatchNorm1d(3))
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        out: Tensor = self.inner(x)
        return out


X, Y = numbers()
SHARED = net()
FAULTS: dict[str, tuple[Callable[[], mh.Task], str]] = {
    "a network": (
        lambda: task((X, Y), model=net()),
        "the model of brought is a network: give a function that builds it, such as model=lambda: "
        "Sequential(...), so that every worker builds the same one from its seed",
    ),
    "the same network each time": (
        lambda: task((X, Y), model=lambda: SHARED),
        "the model of brought is the same network each time: build it inside the function, so that every "
        "worker and every run begins with a new one",
    ),
    "no model": (
        lambda: task((X, Y), model=None),
        "the model of brought must be a function, but is None",
    ),
    "a function that returns nothing": (
        lambda: task((X, Y), model=lambda: None),
        "the model of brought must be an nn.Module, but is None",
    ),
    "a loss that is a number": (
        lambda: task((X, Y), loss=lambda o, t: 0.5),
        "the loss must be a scalar, the mean over its samples, or (sum, weight), but is a float",
    ),
    "no loss": (lambda: task((X, Y), loss=None), "the loss of brought must be a function, but is None"),
    "a loss per sample": (
        lambda: task((X, Y), loss=nn.CrossEntropyLoss(reduction="none")),
        "the loss must be a scalar, the mean over its samples, or (sum, weight), but is a tensor of shape "
        "(8,)",
    ),
    "a loss without a gradient": (
        lambda: task((X, Y), loss=lambda o, t: cross_entropy(o, t).detach()),
        "the loss of brought has no gradient: it must be computed from the model's outputs by torch, without "
        ".item(), .detach() or numpy",
    ),
    "a sum and a mean": (
        lambda: task((X, Y), loss=lambda o, t: (cross_entropy(o, t), len(t))),
        "the loss returns the sum ",
    ),
    "a weight per sample": (
        lambda: task((X, Y), loss=lambda o, t: (cross_entropy(o, t), torch.ones(len(t)))),
        "a loss that returns two values must return (sum, weight), where the weight is one number of at "
        "least 0, such as the number of tokens, not shape (8,)",
    ),
    "nothing to train": (
        lambda: task((X, Y), model=lambda: net().requires_grad_(False), loss=lambda o, t: (o.sum() * 0, 0)),
        "the model of brought has no parameter that requires a gradient",
    ),
    "a metric that is a function": (
        lambda: task((X, Y), metric=lambda o, t: o),
        "the metric of brought must be an mh.Metric, but is a function: use mh.Metric(name=..., scores=...)",
    ),
    "a loss that is a class": (
        lambda: task((X, Y), loss=nn.CrossEntropyLoss),
        "the loss of brought is the class CrossEntropyLoss: use CrossEntropyLoss()",
    ),
    "a loss with parameters": (
        lambda: task((X, Y), loss=nn.AdaptiveLogSoftmaxWithLoss(3, 3, [2])),
        "the loss of brought has parameters, but only those of the model are trained and saved: move them "
        "into the model, or freeze them with requires_grad_(False)",
    ),
    "a preprocess with parameters": (
        lambda: task((X, Y), preprocess=nn.Linear(6, 6)),
        "preprocess of brought has parameters, but only those of the model are trained and saved: move them "
        "into the model, or freeze them with requires_grad_(False)",
    ),
    "lazy layers": (
        lambda: task((X, Y), model=lambda: nn.Sequential(nn.LazyLinear(3))),
        "the model of brought has lazy layers, whose shapes are not known yet: call it once on a sample "
        "inside the function that builds it",
    ),
    "a sum of the model": (
        lambda: with_scalar(torch.sum),
        "the loss of brought uses a scalar of the model that is not a mean over samples: it is ",
    ),
    "one-hot targets": (
        lambda: task((X, nn.functional.one_hot(Y, 3)), loss=lambda o, t: cross_entropy(o, t.argmax(1))),
        "accuracy compares classes of shape (8,), the largest of the outputs, with targets of shape (8, 3): "
        "for one-hot targets use targets.argmax(1), else give the task a Metric of its own",
    ),
    "no preprocess": (
        lambda: task((X, Y), preprocess=None),
        "the preprocess of brought must be a function, but is None",
    ),
    "a function as preprocess": (
        lambda: task((X, Y), preprocess=lambda x: x),
        "preprocess of brought must be an nn.Module, but is a function",
    ),
    "no test samples": (
        lambda: task((X, Y), (X[:0], Y[:0])),
        "the test set of brought is empty: it needs at least one sample",
    ),
    "samples that change": (
        lambda: task(Own()),
        "the samples of train are not the same when they are read again with the same seed, so a run could "
        "not be repeated or resumed: draw random numbers from torch, numpy.random or random, not from a "
        "generator of your own",
    ),
    "no batch": (
        lambda: task(Wrong(X, Y)),
        "stream of train must yield mh.Batch, but yields a tuple",
    ),
    "too many targets": (
        lambda: task(TooMany(X, Y)),
        "targets of train must be tensors with one row per sample, but 8 samples have shape (37,)",
    ),
    "samples that cannot be read": (
        lambda: task([(X[0],)]),
        "a sample must be (input, target), but a batch of them is a list",
    ),
}  # fmt: skip


def test_a_scalar_that_is_a_mean_or_not_used_passes() -> None:
    assert look(with_scalar(torch.mean)).notes == ()
    assert look(with_scalar(torch.sum, used=0.0)).notes == ()


def test_buffers_that_forward_changes_are_named() -> None:
    """Those of torch's own layers are not: batch norm is known."""
    assert look(task((X, Y), model=Counts)).notes == (
        "forward changes seen of the model: with several workers each sees only its own samples, so such "
        "buffers will differ from those of one worker",
    )


def test_parameters_that_forward_changes_need_one_worker(tmp_path: Path) -> None:
    """`Embedding(max_norm=...)` renormalizes its rows in place: other results with messages or shards."""
    words = task(
        (torch.arange(40) % 7, torch.arange(40) % 3),
        model=lambda: nn.Sequential(nn.Embedding(7, 4, max_norm=0.5), nn.Linear(4, 3)),
    )
    assert look(words).writes == ("0.weight",)
    mh.train(words, out=tmp_path / "one", epochs=1, batch=8, quiet=True)
    with pytest.raises(UsageError) as caught:
        mh.train(words, workers=2, out=tmp_path / "two", epochs=1, batch=8, quiet=True)
    assert str(caught.value) == (
        "the model of brought changes its parameter 0.weight in forward (as Embedding(max_norm=...) does), "
        "which each worker would do by itself: use one worker"
    )


def test_preprocess_is_in_the_mode_of_the_model(tmp_path: Path) -> None:
    """It dropped half of the test inputs."""
    modes: list[tuple[bool, bool]] = []

    class Notes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            modes.append((self.training, len(x) == 37))
            return x

    notes = task((X, Y), preprocess=Notes())
    modes.clear()
    mh.train(notes, out=tmp_path / "run", epochs=2, batch=8, quiet=True)
    assert {whole for training, whole in modes if training} == {False}
    assert (False, True) in modes
    assert (True, True) not in modes


FAILURES: dict[str, tuple[Callable[[], mh.Task], type[Exception], str]] = {
    "in the builder": (
        lambda: task((X, Y), model=lambda: nn.Linear("six", 3)),  # type: ignore[arg-type]
        TypeError,
        "the model of brought cannot be built",
    ),
    "in a sample": (
        lambda: task([(X[0], 1), 5]),
        TypeError,
        "the first samples of train cannot be read",
    ),
    "in preprocess": (
        lambda: task((X, Y), preprocess=Broken(6, 6).requires_grad_(False)),
        KeyError,
        "preprocess of brought fails on the first training samples",
    ),
    "in the loss of test samples": (
        lambda: task((X, Y), (X, Y.float()), metric=mh.Metric(name="one", scores=lambda o, t: t)),
        RuntimeError,
        "the loss of brought fails on the first test samples",
    ),
    "in forward": (
        lambda: task((X, Y), model=lambda: Broken(6, 3)),
        KeyError,
        "the model of brought fails on the first 8 training samples",
    ),
    "a shape that does not fit": (
        lambda: task((X[:, :5], Y)),
        RuntimeError,
        "the model of brought fails on the first 8 training samples",
    ),
    "in the loss": (
        lambda: task((X, Y + 7)),
        IndexError,
        "the loss of brought fails on the outputs of the model",
    ),
    "in the metric": (
        lambda: task((X, Y), metric=mh.Metric(name="likes", scores=lambda o, t: o.logits)),
        AttributeError,
        "the metric likes of brought fails on the first test samples",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_sentence(name: str) -> None:
    brought, sentence = FAULTS[name]
    with pytest.raises(UsageError) as caught:
        look(brought())
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FAILURES)
def test_an_error_of_the_users_code_says_what_failed(name: str) -> None:
    brought, kind, sentence = FAILURES[name]
    with pytest.raises(kind) as caught:
        look(brought())
    assert caught.value.__notes__ == [f"{sentence}; nothing was trained"]


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.needs])
def test_what_can_be_trained_passes_and_nothing_changes(name: str) -> None:
    brought = ROWS[name].make()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    found = look(brought)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()  # type: ignore[index]
    assert found.needs_two == (name == "batch_norm")
    assert bool(found.notes) == (name == "unused")


def test_parameters_without_a_gradient_are_named() -> None:
    assert look(task((X, Y), model=Unused)).notes == (
        "2 parameters of the model get no gradient from the first samples: never.weight, never.bias",
    )


FILE = """
import manyhands as mh
from torch import nn
from torch.nn import functional as F
import torch

x = torch.randn(33, 4, generator=torch.Generator().manual_seed(0))

def network():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))

def normed(n=33) -> mh.Task:
    data = x[:n], (x[:n].sum(1) > 0).long()
    defaults = mh.Defaults(batch=8, epochs=1, recipe="constant", recipe_options={"lr": 0.1})
    return mh.Task(name="normed", model=network, train=data, test=data,
                   loss=F.cross_entropy, target=0.9, defaults=defaults)
"""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "",
            "the last batch of an epoch (1 of 33 samples) has one sample, and the batch norm of "
            "mine.py:normed needs at least two: use --drop-last, or another --batch",
        ),
        (
            "--accumulate 5 --batch 32",
            "the last batch of an epoch (1 of 33 samples) has a part with one sample, of 5, and the batch "
            "norm of mine.py:normed needs at least two: use --drop-last, or another --batch",
        ),
        (
            "--accumulate 5 --set n=32",
            "every batch has a part with one sample, of 5, and the batch norm of mine.py:normed needs at "
            "least two: use a larger --batch",
        ),
        ("--drop-last", ""),
        ("--set n=32", ""),
        ("--accumulate 4 --set n=32", ""),
    ],
)
def test_a_last_batch_too_small_for_batch_norm(
    words: str, sentence: str, tmp_path: Path, typed: Callable[..., Answer]
) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    found = typed("train", "mine.py:normed", "--quiet", "--out", "run", *words.split(), cwd=tmp_path)
    assert found.err == (f"error: {sentence}\n" if sentence else "")
    assert found.code == (2 if sentence else 0)
    assert (tmp_path / "run").exists() == (not sentence)


def test_notes_are_said_once(tmp_path: Path, typed: Callable[..., Answer]) -> None:
    rows = Path(__file__).parents[1] / "bring" / "rows.py"
    found = typed("train", f"{rows}:unused", "--epochs", "1", "--batch", "8", cwd=tmp_path)
    assert found.code == 0
    assert found.err.count("get no gradient from the first samples: never.weight, never.bias") == 1
    found = typed("train", f"{rows}:loader", "--epochs", "1", "--batch", "8", cwd=tmp_path)
    assert found.err.count("train: the data set of the DataLoader is used; batch size and order are") == 1


def test_a_map_style_data_set_resumes_in_the_middle(tmp_path: Path) -> None:
    """Its random transforms are those of the run that was not interrupted."""
    rows = Path(__file__).parents[1] / "bring" / "rows.py"
    settings: dict[str, Any] = {"batch": 8, "recipe": "constant", "lr": 0.1, "quiet": True, "epochs": 3}
    whole = mh.train(f"{rows}:random_transform", out=tmp_path / "whole", **settings)
    mh.train(f"{rows}:random_transform", out=tmp_path / "part", samples=50, **settings)
    later = mh.train(
        f"{rows}:random_transform", out=tmp_path / "part", resume=True, allow_changes=True, **settings
    )
    assert (later.steps, later.loss) == (whole.steps, whole.loss)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "part"))
    assert one[-400:] == two[-400:]
    assert len(Squares()) == 37
