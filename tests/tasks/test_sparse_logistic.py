"""Sparse logistic regression: the torch task against the facts, and the facts against what defines them."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import expit
from sklearn.datasets import dump_svmlight_file

from manyhands import train
from manyhands.core.errors import UsageError
from manyhands.data.base import Request
from manyhands.data.order import Order
from manyhands.data.sparse_samples import SparseData, unpack
from manyhands.recipes.members import constant
from manyhands.strategies.base import Compute, Setup
from manyhands.strategies.single import Single
from manyhands.tasks import find
from manyhands.tasks.base import Task
from manyhands.tasks.sparse_logistic import (
    accuracy,
    bins,
    draw,
    loss_and_gradient,
    margins,
    separator,
    sgd_iterates,
    smoothness,
    sparse_logistic,
    touched,
)
from manyhands.testing.tasks import TaskSuite
from manyhands.transports.solo import SoloTransport

SMALL = {"n": 200, "features": 60, "nonzeros": 4}


def dense(data: SparseData) -> np.ndarray:
    out = np.zeros((len(data), data.features))
    rows = np.repeat(np.arange(len(data)), np.diff(data.indptr))
    out[rows, data.indices] = data.values
    return out


def ragged_files(folder: Path, n: int = 60) -> dict[str, str]:
    """Two svmlight files whose samples have 0 to 6 features."""
    generator = np.random.default_rng(3)
    for name, rows in (("train.svm", n), ("test.svm", n // 3)):
        x = generator.standard_normal((rows, 12)) * (generator.random((rows, 12)) < 0.25)
        x[0] = 0
        dump_svmlight_file(x, np.where(x.sum(axis=1) > 0, 1, -1), str(folder / name), zero_based=False)
    return {"file": str(folder / "train.svm"), "test": str(folder / "test.svm")}


@pytest.fixture(params=["equal", "ragged"])
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Task:
    if request.param == "equal":
        return sparse_logistic(**SMALL, noise=0.1)
    return sparse_logistic(**ragged_files(tmp_path))


def at(task: Task, w: np.ndarray, bias: float) -> torch.nn.Module:
    """The task's model, in double precision, with these weights."""
    model = task.model().double()
    with torch.no_grad():
        model.embedding.weight[:-1, 0] = torch.from_numpy(w)
        model.bias.fill_(bias)
    return model


def somewhere(data: SparseData) -> tuple[np.ndarray, float]:
    return np.random.default_rng(0).standard_normal(data.features), 0.3


# ---- what every task promises


class TestGenerated(TaskSuite):
    task = sparse_logistic(**SMALL, noise=0.1)


class TestDense(TaskSuite):
    task = sparse_logistic(**SMALL, sparse=False)


class TestRagged(TaskSuite):
    @pytest.fixture(autouse=True)
    def _task(self, tmp_path: Path) -> None:
        type(self).task = sparse_logistic(**ragged_files(tmp_path))

    def test_a_sample_does_not_depend_on_its_batch(self) -> None:
        """But for the padding, which is as long as the longest of the batch has it."""
        together = self.read(self.task.train, self.first())
        for place, sample in enumerate(self.first()):
            alone = self.read(self.task.train, [sample]).inputs[0]
            width = alone.shape[1]
            assert torch.equal(together.inputs[place][:, :width], alone)
            assert (together.inputs[place][0, width:] == self.task.train.features).all()
            assert not together.inputs[place][1, width:].any()


def test_the_command_line_finds_it() -> None:
    task = find.build("sparse-logistic", {"n": "50", "features": "30", "nonzeros": "3", "sparse": "false"})
    assert (task.name, len(task.train), len(task.test)) == ("sparse-logistic", 50, 10)
    assert not task.model().embedding.sparse


# ---- the generated data


@pytest.mark.parametrize(("features", "nonzeros"), [(10_000, 20), (60, 4), (7, 7), (8, 7), (1, 1), (50, 49)])
def test_bins_cover_all_features_and_none_is_empty(features: int, nonzeros: int) -> None:
    borders = bins(features, nonzeros)
    assert (borders[0], borders[-1], len(borders)) == (0, features, nonzeros + 1)
    assert (np.diff(borders) >= 1).all()


def test_every_sample_has_one_feature_of_every_bin() -> None:
    data, flipped = draw(300, 60, 4)
    rows = data.indices.reshape(300, 4)
    borders = bins(60, 4)
    assert ((rows >= borders[:-1]) & (rows < borders[1:])).all()
    assert not data.ragged
    assert not flipped.any()


def test_some_features_are_common_and_most_are_rare() -> None:
    data = draw(20_000, 1000, 10).data
    counts = np.bincount(data.indices, minlength=1000)
    assert counts[:10].mean() == pytest.approx(2000, rel=0.01)  # 10 of them in the first bin
    assert counts[810:].mean() == pytest.approx(20_000 / 190, rel=0.01)
    assert (counts > 0).all()


def test_the_same_sizes_give_the_same_data_and_the_test_set_is_held_out() -> None:
    once, again = sparse_logistic(**SMALL), sparse_logistic(**SMALL)
    for field in ("indptr", "indices", "values", "targets"):
        assert np.array_equal(getattr(once.train, field), getattr(again.train, field))
        assert np.array_equal(getattr(once.test, field), getattr(again.test, field))
    assert (len(once.train), len(once.test)) == (200, 40)
    samples = [row.tobytes() for data in (once.train, once.test) for row in dense(data)]
    assert len(set(samples)) == 240
    assert 0.4 < once.train.targets.mean() < 0.6


# ---- the facts


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
def test_the_separator_is_right_but_for_what_was_flipped(noise: float) -> None:
    data, flipped = draw(2000, 100, 5, noise)
    assert accuracy(separator(100), 0.0, data) == 1 - flipped.mean()
    assert flipped.mean() == pytest.approx(noise, abs=0.03)
    assert np.array_equal((margins(separator(100), 0.0, data) > 0) != (data.targets == 1), flipped)


def test_at_zero_the_loss_is_ln_2_and_the_gradient_half_the_difference_of_the_classes(task: Task) -> None:
    x, y = dense(task.train), task.train.targets
    loss, gradient, derivative = loss_and_gradient(np.zeros(task.train.features), 0.0, task.train)
    assert loss == pytest.approx(math.log(2), rel=1e-14)
    np.testing.assert_allclose(gradient, ((0.5 - y)[:, None] * x).mean(axis=0), rtol=1e-12, atol=1e-16)
    assert derivative == pytest.approx((0.5 - y).mean(), abs=1e-15)


def test_the_gradient_is_that_of_the_textbook_and_of_differences(task: Task) -> None:
    data = task.train
    w, bias = somewhere(data)
    x, y = dense(data), data.targets
    loss, gradient, derivative = loss_and_gradient(w, bias, data)
    m = x @ w + bias
    p = expit(m)
    assert loss == pytest.approx(-(y * np.log(p) + (1 - y) * np.log(1 - p)).mean(), rel=1e-12)
    np.testing.assert_allclose(gradient, x.T @ (p - y) / len(y), rtol=1e-12, atol=1e-15)
    assert derivative == pytest.approx((p - y).mean(), rel=1e-12)
    direction = np.random.default_rng(1).standard_normal(data.features)
    up, down = (loss_and_gradient(w + h * direction, bias + h, data)[0] for h in (1e-5, -1e-5))
    assert (up - down) / 2e-5 == pytest.approx(gradient @ direction + derivative, rel=1e-6)


def test_margins_of_any_size_have_a_finite_loss(task: Task) -> None:
    w, bias = somewhere(task.train)
    with np.errstate(all="raise", under="ignore"):
        loss, gradient, _ = loss_and_gradient(1e4 * w, bias, task.train)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


def test_the_loss_is_convex_and_no_more_curved_than_the_bound(task: Task) -> None:
    data, generator = task.train, np.random.default_rng(2)
    bound = smoothness(data)
    for _ in range(20):
        u, v = generator.standard_normal((2, data.features + 1)) * generator.choice([0.1, 1, 10])
        at_u, g, d = loss_and_gradient(u[:-1], u[-1], data)
        at_v = loss_and_gradient(v[:-1], v[-1], data)[0]
        line = at_u + np.append(g, d) @ (v - u)
        assert line <= at_v + 1e-12
        assert at_v <= line + 0.5 * bound * np.square(v - u).sum() + 1e-12


def test_gradient_descent_at_the_bound_never_goes_uphill(task: Task) -> None:
    data, rate = task.train, 1 / smoothness(task.train)
    everything = np.arange(len(data))
    path = sgd_iterates(data, [everything] * 100, [rate] * 100)
    losses = [math.log(2), *(loss_and_gradient(w, bias, data)[0] for w, bias in path)]
    assert (np.diff(losses) < 0).all()
    assert losses[-1] < 0.9 * losses[0]


def test_a_batch_touches_the_coordinates_of_its_samples_and_no_others(task: Task) -> None:
    samples = np.array([3, 0, 7])
    places = touched(task.train, samples)
    assert places.tolist() == np.flatnonzero(dense(task.train)[samples].any(axis=0)).tolist()
    w, bias = somewhere(task.train)
    _, gradient, _ = loss_and_gradient(w, bias, task.train.take(samples))
    assert places.tolist() == np.flatnonzero(gradient).tolist()


# ---- torch says the same


def test_the_model_has_the_loss_and_the_gradient_of_the_facts(task: Task) -> None:
    w, bias = somewhere(task.train)
    model, samples = at(task, w, bias), np.arange(0, len(task.train), 3)
    (batch,) = task.train.stream([Request(0, samples)], 0)
    part = task.train.take(samples)
    loss, gradient, derivative = loss_and_gradient(w, bias, part)

    outputs = model(batch.inputs)
    ours = task.loss(outputs, batch.targets)
    ours.backward()
    np.testing.assert_allclose(outputs.detach().numpy(), margins(w, bias, part), rtol=1e-12, atol=1e-14)
    assert ours.item() == pytest.approx(loss, rel=1e-12)
    sparse = model.embedding.weight.grad
    assert sparse.is_sparse
    whole = sparse.to_dense().squeeze(1).numpy()
    np.testing.assert_allclose(whole[:-1], gradient, rtol=1e-12, atol=1e-15)
    assert whole[-1] == 0
    assert model.bias.grad.item() == pytest.approx(derivative, rel=1e-10)
    assert np.unique(sparse._indices().numpy()).tolist() == touched(task.train, samples).tolist()
    scores = task.metric.scores(outputs, batch.targets)
    assert scores.double().mean().item() == accuracy(w, bias, part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_take_the_type_of_the_model(task: Task, dtype: torch.dtype) -> None:
    model = task.model().to(dtype)
    (batch,) = task.train.stream([Request(0, np.arange(9))], 0)
    loss = task.loss(model(batch.inputs), batch.targets)
    loss.backward()
    assert loss.dtype == model.bias.grad.dtype == model.embedding.weight.grad.dtype == dtype
    assert loss.item() == pytest.approx(math.log(2), rel=1e-6)
    assert unpack(batch.inputs)[1].dtype == torch.float32


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_single_walks_the_path_of_the_facts(tmp_path: Path, sparse: bool, accumulate: int) -> None:
    for options in (SMALL, ragged_files(tmp_path)):
        task = sparse_logistic(**options, sparse=sparse)
        n = len(task.train)
        requests = list(islice(Order(n, 16, seed=4).batches(), 2 * -(-n // 16)))
        rates = [2.0 / (1 + step) for step in range(len(requests))]
        path = sgd_iterates(task.train, [request.samples for request in requests], rates)
        model = task.model().double()
        setup = Setup(model=model, recipe=constant(), compute=Compute(task.loss), transport=SoloTransport())
        worker = Single(setup)
        for request, rate, (w, bias) in zip(requests, rates, path, strict=True):
            parts = [Request(0, part) for part in np.array_split(request.samples, accumulate) if len(part)]
            worker.step(task.train.stream(parts, 0), len(request.samples), rate)
            ours = model.embedding.weight.detach().squeeze(1).numpy()
            np.testing.assert_allclose(ours[:-1], w, rtol=0, atol=1e-13)
            assert ours[-1] == 0
            assert model.bias.item() == pytest.approx(bias, abs=1e-13)


def test_the_trainer_walks_it_too(here: Path) -> None:
    from safetensors.torch import load_file

    record = train(
        "sparse-logistic",
        options=SMALL,
        batch=16,
        epochs=2,
        seed=4,
        dtype="float64",
        quiet=True,
        out=here / "a",
    )
    data = sparse_logistic(**SMALL).train
    requests = list(islice(Order(200, 16, seed=4).batches(), 26))
    w, bias = sgd_iterates(data, [request.samples for request in requests], [2.0] * 26)[-1]
    tensors = load_file(here / "a" / "model.safetensors")
    np.testing.assert_allclose(tensors["embedding.weight"][:-1, 0].numpy(), w, rtol=0, atol=1e-12)
    assert tensors["bias"].item() == pytest.approx(bias, abs=1e-12)
    assert record.metric == accuracy(w, bias, sparse_logistic(**SMALL).test)


def test_the_defaults_reach_the_target_with_room(here: Path) -> None:
    record = train("sparse-logistic", threads=1, quiet=True, epochs=3)
    assert record.target_samples is not None
    assert record.metric is not None
    assert record.metric > 0.925


# ---- options that cannot be


def test_every_fifth_sample_of_a_file_is_for_the_test(tmp_path: Path) -> None:
    files = ragged_files(tmp_path, n=23)
    task = sparse_logistic(file=files["file"])
    assert (len(task.train), len(task.test)) == (19, 4)
    whole = sparse_logistic(**files).train
    rows = np.arange(23)
    assert np.array_equal(dense(task.test), dense(whole)[4::5])
    assert np.array_equal(dense(task.train), dense(whole)[rows % 5 != 4])


def test_noise_lowers_the_target() -> None:
    assert sparse_logistic(**SMALL).target == 0.92
    assert sparse_logistic(**SMALL, noise=0.25).target == pytest.approx(0.5 + 0.42 / 4)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"nonzeros": 9, "features": 8}, "sparse-logistic: option nonzeros = 9 is more than features = 8"),
        ({"n": 0}, "sparse-logistic: option n = 0 is not greater than or equal to 1"),
        ({"noise": 0.5}, "sparse-logistic: option noise = 0.5 is not less than 0.5"),
        ({"noise": -0.1}, "sparse-logistic: option noise = -0.1 is not greater than or equal to 0"),
        ({"sparse": "perhaps"}, "sparse-logistic: option sparse = 'perhaps' is not a valid boolean"),
        ({"test": "b"}, "sparse-logistic: option test = 'b' needs file=PATH, the samples to train on"),
        (
            {"file": "few"},
            "sparse-logistic: few has 2 samples, too few to use every 5th for testing: give test=PATH",
        ),
        ({"file": "none"}, "there is no file none"),
        ({"file": "few", "n": 5}, "sparse-logistic: option n = 5 is for generated data, not for a file"),
        (
            {"file": "few", "noise": 0.1},
            "sparse-logistic: option noise = 0.1 is for generated data, not for a file",
        ),
        (
            {"width": 3},
            "sparse-logistic has no option 'width' (known: n, features, nonzeros, noise, file, test, sparse)",
        ),
    ],
)
def test_bad_options(here: Path, options: dict[str, object], sentence: str) -> None:
    (here / "few").write_text("1 1:1\n-1 2:1\n")
    with pytest.raises(UsageError) as error:
        find.build("sparse-logistic", options)
    assert str(error.value) == sentence
