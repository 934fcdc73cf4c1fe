"""Keras models train in training mode, under names of their own, and come back as Keras models."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import manyhands as mh
from manyhands.core.errors import UsageError
from manyhands.data.order import Order
from manyhands.tasks.keras_model import KerasModule

os.environ["KERAS_BACKEND"] = "torch"
keras = pytest.importorskip("keras")
layers = keras.layers

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, :3].sum(1) > 0).long()


def normed(rate: float = 0.0) -> Any:
    inner = [
        layers.Dense(8),
        layers.BatchNormalization(),
        layers.Dropout(rate),
        layers.ReLU(),
        layers.Dense(2),
    ]
    return keras.Sequential([keras.Input((6,)), *inner])


def task(model: Callable[[], Any] = normed) -> mh.Task:
    defaults = mh.Defaults(batch=12, epochs=3, recipe="constant", recipe_options={"lr": 0.1, "momentum": 0.0})
    return mh.Task(
        name="of keras",
        model=model,
        train=(X, Y),
        test=(X, Y),
        loss=cross_entropy,
        target=0.9,
        defaults=defaults,
    )


def dropping() -> mh.Task:
    return task(lambda: normed(0.5))


def test_it_is_a_loop_written_by_hand(tmp_path: Path) -> None:
    """Training mode included: batch norms take the statistics of the batch, and move their own."""
    run = mh.train(task, out=tmp_path / "run", quiet=True, threads=1)
    found = run.model()
    assert isinstance(found, keras.Sequential)
    from manyhands.data import generators

    with generators.kept():
        generators.seed(0)
        model = normed()
    trained = [variable.value for variable in model.trainable_variables]
    optimizer = torch.optim.SGD(trained, 0.1)
    for _, request in zip(range(15), Order.of(60, 12, 0).batches(0), strict=False):
        samples = torch.tensor(request.samples)
        optimizer.zero_grad()
        cross_entropy(model(X[samples], training=True), Y[samples]).backward()
        optimizer.step()
    for ours, theirs in zip(found.weights, model.weights, strict=True):
        torch.testing.assert_close(ours.value, theirs.value, rtol=1e-5, atol=1e-6)
    assert float(found.layers[1].moving_mean.value.abs().max()) > 0.01
    right = (found(X).argmax(1) == Y).float().mean()
    assert run.metric == pytest.approx(float(right))


def test_names_do_not_depend_on_what_was_built_before() -> None:
    names = [list(task().build().state_dict()) for _ in range(2)]
    assert names[0] == names[1]
    assert names[0][:3] == ["dense/kernel", "dense/bias", "batch_normalization/gamma"]
    named = keras.Sequential([keras.Input((6,)), layers.Dense(2, name="head_7")])
    assert list(task(lambda: named).build().state_dict()) == ["head_7/kernel", "head_7/bias"]


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"strategy": "allreduce", "workers": 2}, marks=pytest.mark.soak)]
)
def test_dropout_is_resumed_to_the_same_bits(settings: dict[str, Any], tmp_path: Path) -> None:
    more: dict[str, Any] = {"quiet": True, "threads": 1, **settings}
    whole = mh.train(dropping, out=tmp_path / "whole", **more)
    mh.train(dropping, out=tmp_path / "part", samples=84, **more)
    part = mh.train(dropping, out=tmp_path / "part", resume=True, allow_changes=True, **more)
    again = mh.train(dropping, out=tmp_path / "again", **more | {"seed": 1})
    assert part.resumed == 1
    ours, theirs = whole.state_dict(), part.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert not torch.equal(ours["dense/kernel"], again.state_dict()["dense/kernel"])


def test_every_call_in_training_drops_other_units_and_no_call_in_evaluation() -> None:
    model = dropping().build()
    first, second = model(X), model(X)
    assert not torch.equal(first, second)
    model.eval()
    state = torch.get_rng_state()
    assert torch.equal(model(X), model(X))
    assert torch.equal(state, torch.get_rng_state())


def test_float64_is_computed_in_float64() -> None:
    model = task().build(torch.float64).eval()
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float64}
    tensors = model.state_dict()
    hidden = X.double() @ tensors["dense/kernel"] + tensors["dense/bias"]
    hidden = (hidden / (1 + 1e-3) ** 0.5).relu()  # an untrained batch norm
    by_hand = hidden @ tensors["dense_1/kernel"] + tensors["dense_1/bias"]
    assert float((model(X.double()).detach() - by_hand).abs().max()) < 1e-14
    assert keras.config.floatx() == "float32"
    assert keras.backend.result_type("float64", "float64") == "float32"  # as Keras has it


def test_threads_that_build_at_a_time_leave_the_type_as_it_was() -> None:
    """A study resolves its cells in threads: one of them left float64 behind for all."""
    dtypes = [torch.float64, torch.float32] * 6
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda dtype: {p.dtype for p in task().build(dtype).parameters()}, dtypes)
    assert list(found) == [{dtype} for dtype in dtypes]
    assert keras.config.floatx() == "float32"


def test_frozen_layers_stay() -> None:
    def model() -> Any:
        made = normed()
        made.layers[0].trainable = False
        return made

    built = task(model).build()
    assert {name for name, p in built.named_parameters() if not p.requires_grad} == {
        "dense/kernel",
        "dense/bias",
    }
    assert {name for name, _ in built.named_buffers()} == {
        "batch_normalization/moving_mean", "batch_normalization/moving_variance",
    }  # fmt: skip


def test_a_keras_model_inside_a_torch_module_follows_its_mode() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = normed()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out

    built = task(Around).build()
    assert isinstance(built.inner, KerasModule)
    built(X)
    assert float(built.inner.state_dict()["batch_normalization/moving_mean"].abs().max()) > 0


class Penalized(layers.Layer):  # type: ignore[misc, name-defined]
    def call(self, x: Tensor) -> Tensor:
        self.add_loss(x.square().mean())
        return x


class Unbuilt(keras.Model):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(2)
        self.built = True

    def call(self, x: Tensor) -> Any:
        return self.inner(x)


def regularized() -> Any:
    return keras.Sequential([keras.Input((6,)), layers.Dense(2, kernel_regularizer="l2")])


EXTRA = (
    "which a loss of outputs and targets does not have: use the weight decay of a recipe, or return the term "
    "as an output and add it in the loss"
)
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "not built": (
        lambda: keras.Sequential([layers.Dense(2)]),
        {},
        "the Keras model of of keras has no weights yet: begin it with keras.Input(shape), or call it once "
        "on a sample before it is returned",
    ),
    "regularizer": (
        regularized,
        {},
        f"the Keras model of of keras adds losses of its own (a regularizer), {EXTRA}",
    ),
    "add_loss": (
        lambda: keras.Sequential([keras.Input((6,)), layers.Dense(2), Penalized()]),
        {},
        f"the Keras model of of keras adds losses of its own (add_loss), {EXTRA}",
    ),
    "built without weights": (
        Unbuilt,
        {},
        "the Keras model of of keras has no weights yet: begin it with keras.Input(shape), or call it once "
        "on a sample before it is returned",
    ),
    "constraint": (
        lambda: keras.Sequential([keras.Input((6,)), layers.Dense(2, kernel_constraint="non_neg")]),
        {},
        "the Keras model of of keras has constraints, which only the optimizers of Keras apply: leave them "
        "out, or compute them in the layer",
    ),
    "stages": (
        normed,
        {"strategy": "layers", "workers": 2},
        "of keras is a Keras model, which cannot be divided into 2 stages: use single, allreduce, average, "
        "server, hogwild, sharded",
    ),
    "batch norm": (
        normed,
        {"workers": 2, "sync_batchnorm": True},
        "--sync-batchnorm cannot reach the batch norms of a Keras model: leave it out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_a_sentence(case: str, tmp_path: Path) -> None:
    model, settings, sentence = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        mh.train(task(model), out=tmp_path / "run", quiet=True, **settings)
    assert str(caught.value) == sentence
    assert not (tmp_path / "run").exists()


def test_another_backend_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(
        UsageError, match=r"^the Keras model of of keras runs on jax, not on torch: set KERAS"
    ):
        task().build()
