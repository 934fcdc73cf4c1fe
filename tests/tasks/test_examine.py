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
        "the model of brought must be a function, but is a NoneType",
    ),
    "a function that returns nothing": (
        lambda: task((X, Y), model=lambda: None),
        "the model of brought must be an nn.Module, but is a NoneType",
    ),
    "a loss that is a number": (
        lambda: task((X, Y), loss=lambda o, t: 0.5),
        "the loss must be a scalar, the mean over its samples, or (sum, weight), but is a float",
    ),
    "no loss": (lambda: task((X, Y), loss=None), "the loss of brought must be a function, but is a NoneType"),
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
    "no preprocess": (
        lambda: task((X, Y), preprocess=None),
        "the preprocess of brought must be a function, but is a NoneType",
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
        lambda: task((X, Y), preprocess=Broken(6, 6)),
        KeyError,
        "preprocess of brought fails on the first training samples",
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
