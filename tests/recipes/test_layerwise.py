"""Lars and Lamb against the papers' formulas, written once more in NumPy."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from manyhands.recipes.layerwise import Lamb, Lars, local_norms
from manyhands.recipes.members import lamb, lars
from manyhands.recipes.optimizers import build, set_lr

SHAPES = {"weight": (4, 3), "second": (5,), "bias": (3,)}
RATES = [0.1, 0.2, 0.4, 0.4, 0.04, 0.0]


def draws():
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=shape) for name, shape in SHAPES.items()}
    gradients = [{name: random.normal(size=shape) for name, shape in SHAPES.items()} for _ in RATES]
    return weights, gradients


def lars_oracle(weights, gradients, *, momentum, decay, coefficient):
    weights = dict(weights)
    velocity = {name: np.zeros_like(weight) for name, weight in weights.items()}
    for lr, gradient in zip(RATES, gradients, strict=True):
        for name, w in weights.items():
            g, wd, trust = gradient[name], decay, 1.0
            if name == "bias":
                wd = 0.0
            else:
                norm_w, norm_g = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
                trust = coefficient * norm_w / (norm_g + wd * norm_w + 1e-9)
            velocity[name] = momentum * velocity[name] + trust * (g + wd * w)
            weights[name] = w - lr * velocity[name]
    return weights


def lamb_oracle(weights, gradients, *, beta1, beta2, decay, clamp):
    weights = dict(weights)
    m = {name: np.zeros_like(weight) for name, weight in weights.items()}
    v = {name: np.zeros_like(weight) for name, weight in weights.items()}
    for t, (lr, gradient) in enumerate(zip(RATES, gradients, strict=True), start=1):
        for name, w in weights.items():
            m[name] = beta1 * m[name] + (1 - beta1) * gradient[name]
            v[name] = beta2 * v[name] + (1 - beta2) * gradient[name] ** 2
            r = (m[name] / (1 - beta1**t)) / (np.sqrt(v[name] / (1 - beta2**t)) + 1e-6)
            if name == "bias":
                weights[name] = w - lr * r
                continue
            u = r + decay * w
            phi = min(np.sqrt((w**2).sum()), clamp if clamp is not None else np.inf)
            weights[name] = w - lr * phi / np.sqrt((u**2).sum()) * u
    return weights


def train(recipe, weights, gradients, **options):
    parameters = {name: nn.Parameter(torch.tensor(weight)) for name, weight in weights.items()}
    optimizer = build(recipe, parameters.items(), {"bias"}, **options)
    for lr, gradient in zip(RATES, gradients, strict=True):
        set_lr(optimizer, lr)
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(gradient[name])
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}, optimizer


def assert_same(actual, expected):
    for name in SHAPES:
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-12, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_lars_follows_the_paper(momentum, decay):
    weights, gradients = draws()
    actual, _ = train(lars(momentum=momentum, weight_decay=decay, coefficient=0.02), weights, gradients)
    assert_same(actual, lars_oracle(weights, gradients, momentum=momentum, decay=decay, coefficient=0.02))


@pytest.mark.parametrize("clamp", [None, 1.0])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_lamb_follows_the_paper(clamp, decay):
    weights, gradients = draws()
    recipe = lamb(beta1=0.8, beta2=0.95, weight_decay=decay, clamp=clamp)
    actual, _ = train(recipe, weights, gradients)
    assert_same(actual, lamb_oracle(weights, gradients, beta1=0.8, beta2=0.95, decay=decay, clamp=clamp))


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [(lars(), {"momentum_buffer"}), (lamb(), {"exp_avg", "exp_avg_sq", "step"})],
    ids=["lars", "lamb"],
)
def test_state_keys(recipe, keys):
    _, optimizer = train(recipe, *draws())
    assert all(set(state) == keys for state in optimizer.state.values())


@pytest.mark.parametrize("recipe", [lars(), lamb()], ids=["lars", "lamb"])
def test_norms_are_asked_once_a_step_for_the_decayed_group(recipe):
    calls = []

    def norms(tensors):
        calls.append([tuple(tensor.shape) for tensor in tensors])
        return local_norms(tensors)

    train(recipe, *draws(), norms=norms)
    assert calls == [[(4, 3), (5,)] * 2] * len(RATES)


@pytest.mark.parametrize("recipe", [lars(weight_decay=0.05), lamb(weight_decay=0.05)], ids=["lars", "lamb"])
def test_slices_with_shared_norms_follow_the_whole(recipe):
    """Two owners of a slice of each layer, one slice empty, add the squares of their norms."""
    weights, gradients = draws()
    whole, _ = train(recipe, weights, gradients)
    flat = {name: torch.tensor(weight).flatten() for name, weight in weights.items()}
    cuts = {"weight": 7, "second": 5, "bias": 1}
    barrier = threading.Barrier(2, timeout=10)
    squares = {}

    def own(owner):
        def norms(tensors):
            squares[owner] = local_norms(tensors).square()
            barrier.wait()
            total = squares[0] + squares[1]
            barrier.wait()  # neither writes before both have read
            return total.sqrt()

        parts = {name: slice(cut, None) if owner else slice(0, cut) for name, cut in cuts.items()}
        mine = {name: flat[name][part] for name, part in parts.items()}
        optimizer = build(recipe, mine.items(), {"bias"}, norms=norms)
        for lr, gradient in zip(RATES, gradients, strict=True):
            set_lr(optimizer, lr)
            for name, tensor in mine.items():
                tensor.grad = torch.tensor(gradient[name]).flatten()[parts[name]]
            optimizer.step()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(own, range(2)))
    for name, tensor in flat.items():
        np.testing.assert_allclose(tensor.numpy(), whole[name].ravel(), rtol=1e-12, err_msg=name)


def test_zero_norms_mean_a_trust_of_one():
    """A layer of zeros takes the plain step; a gradient of zero adds plain decay and nothing huge."""
    zeros, still = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    zeros.grad, still.grad = torch.ones(3), torch.zeros(3)
    Lars([zeros, still], 0.5, weight_decay=0.1).step()
    torch.testing.assert_close(zeros.detach(), torch.full((3,), -0.5))
    torch.testing.assert_close(still.detach(), torch.full((3,), 0.95))

    zeros, still = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    zeros.grad, still.grad = torch.ones(3), torch.zeros(3)
    Lamb([zeros, still], 0.5).step()
    torch.testing.assert_close(zeros.detach(), torch.full((3,), -0.5))
    torch.testing.assert_close(still.detach(), torch.ones(3))


@pytest.mark.parametrize("optimizer", [Lars, Lamb])
def test_closure_is_evaluated_with_gradients(optimizer):
    weight = nn.Parameter(torch.ones(2))
    built = optimizer([weight], 0.1)

    def closure():
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    assert built.step(closure) == 2.0
    assert (weight < 1).all()
