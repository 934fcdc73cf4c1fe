"""Logistic regression on sparse data: few features per sample, known true weights.

With x a sample, y its target (0 or 1) and sigma the logistic function:

    margin = w.x + b     loss = log(1 + exp(margin)) - y margin     gradient = (sigma(margin) - y) x

So the gradient of a batch is zero at every feature that none of its samples has. The functions below compute
all of this in numpy; the task computes it again in torch.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge, Lt
from torch import Tensor, nn
from torch.nn import functional

from manyhands.core.errors import UsageError
from manyhands.core.registry import Count
from manyhands.data.base import Samples
from manyhands.data.order import key
from manyhands.data.sparse_samples import SparseData, svmlight_files, unpack
from manyhands.tasks.base import Defaults, Metric, Task

Array = npt.NDArray[np.float64]
Noise = Annotated[float, Ge(0), Lt(0.5)]  # with 0.5 there is nothing to learn

N, FEATURES, NONZEROS = 100_000, 10_000, 20
HELD_OUT = 5  # every 5th sample of a file is for testing; generated data gets n / 5 test samples
TARGET = 0.92


# ---- the generated data


class Drawn(NamedTuple):
    """Generated samples, and which of them have a flipped label."""

    data: SparseData
    flipped: npt.NDArray[np.bool_]


def separator(features: int) -> Array:
    """The true weights w* that generate the labels: a function of the number of features."""
    return _generator(features).standard_normal(features)


def bins(features: int, nonzeros: int) -> Samples:
    """The boundaries of the bins. Bin k is about 2k + 1 times as wide as the first."""
    k = np.arange(nonzeros + 1)
    return np.maximum(features * k**2 // nonzeros**2, k)


def draw(n: int, features: int, nonzeros: int, noise: float = 0.0) -> Drawn:
    """n samples, each with one feature of every bin: a function of the arguments.

    As in text, few features are common and most are rare. Those of the first, narrow bin occur about
    2 * nonzeros times as often as those of the last. The label is the sign of w*.x, flipped with probability
    `noise`.
    """
    generator = _generator(n, features, nonzeros)
    borders = bins(features, nonzeros)
    indices = generator.integers(borders[:-1], borders[1:], (n, nonzeros))
    values = generator.standard_normal((n, nonzeros), dtype=np.float32)
    flipped = generator.random(n) < noise
    indptr = np.arange(n + 1, dtype=np.int64) * nonzeros
    unlabeled = SparseData(indptr, indices.ravel(), values.ravel(), np.zeros(n, dtype=np.int64), features)
    targets = (margins(separator(features), 0.0, unlabeled) > 0) ^ flipped
    return Drawn(SparseData(indptr, unlabeled.indices, unlabeled.values, targets * 1, features), flipped)


def _generator(*numbers: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key(*numbers)))


# ---- the closed form


def margins(w: Array, bias: float, data: SparseData) -> Array:
    """w.x + b of every sample."""
    terms: Array = data.values * w[data.indices]
    return _sums(_rows(data), terms, len(data)) + bias


def accuracy(w: Array, bias: float, data: SparseData) -> float:
    """The fraction of correct samples. For w* it is exactly the fraction that was not flipped."""
    return float(np.mean((margins(w, bias, data) > 0) == (data.targets == 1)))


def loss_and_gradient(w: Array, bias: float, data: SparseData) -> tuple[float, Array, float]:
    """The mean loss, its gradient for w and its derivative for the bias. At zero the loss is ln 2."""
    m = margins(w, bias, data)
    loss = np.logaddexp(0.0, np.where(data.targets == 1, -m, m)).mean()
    residuals = (0.5 * (1.0 + np.tanh(0.5 * m)) - data.targets) / len(data)  # tanh does not overflow
    gradient = _sums(data.indices, data.values * residuals[_rows(data)], data.features)
    return float(loss), gradient, float(residuals.sum())


def smoothness(data: SparseData) -> float:
    """A bound L of the curvature of the loss: gradient descent with lr <= 1/L never increases it.

    The Hessian is the mean of sigma (1 - sigma) x x^T, with the bias's 1 in x, so at most mean |x|^2 / 4.
    """
    return 0.25 * (float(np.square(data.values, dtype=np.float64).sum()) / len(data) + 1.0)


def touched(data: SparseData, samples: Samples) -> Samples:
    """The sorted features where the gradient of these samples may not be zero."""
    return np.unique(data.take(samples).indices)


def sgd_iterates(data: SparseData, batches: list[Samples], lrs: list[float]) -> list[tuple[Array, float]]:
    """The weights and the bias after each step of SGD from zero, computed without torch."""
    w, bias, path = np.zeros(data.features), 0.0, []
    for samples, lr in zip(batches, lrs, strict=True):
        _, gradient, derivative = loss_and_gradient(w, bias, data.take(samples))
        w, bias = w - lr * gradient, bias - lr * derivative
        path.append((w, bias))
    return path


def _rows(data: SparseData) -> Samples:
    return np.repeat(np.arange(len(data)), np.diff(data.indptr))


def _sums(indices: Samples, terms: Array, length: int) -> Array:
    """Sum the terms of each index."""
    return np.bincount(indices, weights=terms, minlength=length).astype(np.float64)


# ---- the task


class SparseLogistic(nn.Module):
    """One weight per feature, a row for padding, and a bias. Returns the margin of each sample.

    With `sparse`, the gradient of the weights contains only the rows that a batch has read.
    """

    def __init__(self, features: int, *, sparse: bool, ragged: bool) -> None:
        super().__init__()
        # `padding_idx` keeps padding out of the gradient, so that workers do not all write to its row. Its
        # values are 0, so results are the same without it. It costs 1/7 of a step at batch 32 and 1/3 at
        # 256, so it is only used if there is padding.
        padding = features if ragged else None
        self.embedding = nn.Embedding(features + 1, 1, sparse=sparse, padding_idx=padding)
        nn.init.zeros_(self.embedding.weight)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Sum the weights of each sample's features, times their values."""
        indices, values = unpack(inputs)
        # nn.EmbeddingBag does the same in one call, but a step takes 10 % longer
        weights = self.embedding(indices).squeeze(2)
        margins: Tensor = (weights * values.to(weights.dtype)).sum(dim=1) + self.bias
        return margins


def sparse_logistic(
    *,
    n: Count = N,
    features: Count = FEATURES,
    nonzeros: Count = NONZEROS,
    noise: Noise = 0.0,
    file: str = "",
    test: str = "",
    sparse: bool = True,
) -> Task:
    """Logistic regression on generated sparse samples, or on svmlight files such as RCV1."""
    sizes = {
        "n": (n, N),
        "features": (features, FEATURES),
        "nonzeros": (nonzeros, NONZEROS),
        "noise": (noise, 0),
    }
    if file:
        for name, (value, default) in sizes.items():
            if value != default:
                raise UsageError(
                    f"sparse-logistic: option {name} = {value} is for generated data, not for a file"
                )
        train, held_out = _read(file, test)
    elif test:
        raise UsageError(f"sparse-logistic: option test = {test!r} needs file=PATH, the samples to train on")
    else:
        train, held_out = _generate(n, features, nonzeros, noise)
    ragged = train.ragged or held_out.ragged
    return Task(
        name="sparse-logistic",
        model=lambda: SparseLogistic(train.features, sparse=sparse, ragged=ragged),
        train=train,
        test=held_out,
        loss=_loss,
        metric=Metric(name="accuracy", scores=_right),
        # noise counts twice: the model learns from wrong labels and is tested with wrong labels (the target
        # was reached with noise 0.02, 0.1 and 0.25)
        target=0.5 + (TARGET - 0.5) * (1 - 2 * noise) ** 2,
        evaluation_batch=2000,
        defaults=Defaults(batch=32, epochs=5, recipe="constant", recipe_options={"lr": 2.0}),
    )


def _loss(margins: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(margins, targets.to(margins.dtype))


def _right(margins: Tensor, targets: Tensor) -> Tensor:
    return (margins > 0) == (targets == 1)


def _generate(n: int, features: int, nonzeros: int, noise: float) -> tuple[SparseData, SparseData]:
    if nonzeros > features:
        raise UsageError(f"sparse-logistic: option nonzeros = {nonzeros} is more than features = {features}")
    data = draw(n + math.ceil(n / HELD_OUT), features, nonzeros, noise).data
    samples = np.arange(len(data))
    return data.take(samples[:n]), data.take(samples[n:])


def _read(file: str, test: str) -> tuple[SparseData, SparseData]:
    if test:
        train, held_out = svmlight_files([file, test])
        return train, held_out
    (data,) = svmlight_files([file])
    if len(data) < HELD_OUT:
        raise UsageError(
            f"sparse-logistic: {file} has {len(data)} samples, too few to use every {HELD_OUT}th for testing"
            ": give test=PATH"
        )
    last = np.arange(len(data)) % HELD_OUT == HELD_OUT - 1
    return data.take(np.flatnonzero(~last)), data.take(np.flatnonzero(last))
