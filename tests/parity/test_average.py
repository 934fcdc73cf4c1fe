"""Local SGD against what can be computed without it: one worker, all-reduce, and numpy by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manyhands.data.base import Batch
from manyhands.recipes.base import Recipe
from manyhands.recipes.members import constant, lamb, lars
from manyhands.strategies.base import Compute, SynchronousSetup
from manyhands.strategies.data_parallel.allreduce import AllReduce
from manyhands.strategies.local_sgd.average import Average
from manyhands.strategies.options import AverageOptions
from manyhands.strategies.single import Single
from manyhands.tasks import find
from manyhands.tasks.quadratic import Displacement, points, stiffness
from manyhands.transports.base import Transport
from manyhands.transports.solo import SoloTransport
from manyhands.transports.threads import ThreadGroup
from parity.alike import (
    FEATURES,
    Mixed,
    Sometimes,
    Sparse,
    State,
    Strided,
    batches,
    close,
    copied,
    make,
    normed,
    plain,
    share,
    tied_and_frozen,
)

Array = npt.NDArray[np.float64]
SGD = constant(lr=0.1)
DECAYED = constant(lr=0.1, weight_decay=0.1)
MOMENTUM = constant(lr=0.1, momentum=0.9, weight_decay=0.01)
NESTEROV = constant(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
RECIPES = {"sgd": SGD, "decayed": DECAYED, "momentum": MOMENTUM, "nesterov": NESTEROV}
EVERY_STEP = AverageOptions(every=1)
SIZES = (9, 10, 2, 7, 1, 8)  # uneven, and twice fewer samples than three workers


# ---- workers


def drive(worker: Any, rank: int, workers: int, data: list[Batch], accumulate: int = 1) -> tuple[State, Any]:
    losses = [
        worker.step(share(batch, rank, workers, accumulate), batch.size, lr=0.1 / (1 + number)).loss
        for number, batch in enumerate(data)
    ]
    return copied(worker.state()), losses


def setup(
    model: Callable[[], nn.Module], recipe: Recipe, transport: Transport, options: Any = EVERY_STEP
) -> SynchronousSetup:
    compute = Compute(nn.functional.cross_entropy)
    return SynchronousSetup(
        model=make(model), recipe=recipe, compute=compute, transport=transport, options=options, epoch=100
    )


def alone(model: Callable[[], nn.Module], recipe: Recipe, data: list[Batch]) -> tuple[State, Any]:
    return drive(Single(setup(model, recipe, SoloTransport())), 0, 1, data)


def together(
    workers: int,
    model: Callable[[], nn.Module],
    recipe: Recipe,
    data: list[Batch],
    accumulate: int = 1,
    strategy: Any = Average,
) -> list[tuple[State, Any]]:
    """Models are built one after the other (threads share torch's generator), then all train at once."""
    group = ThreadGroup(workers, timeout=20)
    setups = [setup(model, recipe, group.transport(rank)) for rank in range(workers)]

    def work(transport: Transport) -> tuple[State, Any]:
        rank = transport.rank
        return drive(strategy(setups[rank]), rank, workers, data, accumulate)

    return group.run(work)


# ---- an average a step is all-reduce


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_average_a_step_is_one_worker_and_allreduce(recipe: str, workers: int) -> None:
    data = batches(SIZES)
    expected, losses = alone(plain, RECIPES[recipe], data)
    others = together(workers, plain, RECIPES[recipe], data, strategy=AllReduce)
    theirs = others[0][0]  # rank 0's, who puts it together
    for state, found in together(workers, plain, RECIPES[recipe], data):
        close(state, expected)
        close(state, theirs)
        assert found == pytest.approx(losses, abs=1e-12)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        (tied_and_frozen, NESTEROV),
        (Strided, NESTEROV),
        (Mixed, MOMENTUM),
        (Sometimes, SGD),  # with momentum, who does not use a parameter does not forget its past steps either
        (Sparse, SGD),
    ],
)
def test_every_kind_of_model(model: Callable[[], nn.Module], recipe: Recipe) -> None:
    data = batches((8, 6, 2, 9, 12))
    expected, _ = alone(model, recipe, data)
    for state, _ in together(3, model, recipe, data):
        close(state, expected, 1e-6 if model is Mixed else 1e-11)  # half of it computes in float32


@settings(max_examples=25)
@given(
    workers=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 17), min_size=1, max_size=4),
    recipe=st.sampled_from(sorted(RECIPES)),
)
def test_any_division_of_any_batches(workers: int, accumulate: int, sizes: list[int], recipe: str) -> None:
    data = batches(sizes)
    expected, losses = alone(plain, RECIPES[recipe], data)
    for state, found in together(workers, plain, RECIPES[recipe], data, accumulate):
        close(state, expected, 1e-10)
        assert found == pytest.approx(losses, abs=1e-11)


@pytest.mark.parametrize(
    "recipe",
    [SGD, NESTEROV, constant(optimizer="adamw", weight_decay=0.1), lars(), lamb(), constant(clip=0.01)],
    ids=lambda recipe: recipe.optimizer,
)
@pytest.mark.parametrize("every", [1, 3, 16])
def test_one_worker_is_single_to_the_last_bit(recipe: Recipe, every: int) -> None:
    data = batches((9, 10, 2, 7, 8))
    expected, losses = alone(normed, recipe, data)
    worker = Average(setup(normed, recipe, SoloTransport(), AverageOptions(every=every)))
    state, found = drive(worker, 0, 1, data)
    assert found == losses
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def test_batch_norm_by_worker_is_one_worker_that_takes_the_shares_in_turn() -> None:
    data = batches((9, 12, 10))
    expected, losses = drive(Single(setup(normed, NESTEROV, SoloTransport())), 0, 1, data, accumulate=3)
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    theirs, _ = together(3, normed, NESTEROV, data, strategy=AllReduce)[0]
    for state, found in together(3, normed, NESTEROV, data):
        close(state, expected, skip=statistics)
        close(state, theirs)  # running statistics too
        assert found == pytest.approx(losses, abs=1e-12)


def test_a_constant_buffer_is_not_touched_by_rounding() -> None:
    before = make(Sometimes).constant
    for state, _ in together(3, Sometimes, MOMENTUM, batches((7, 8, 9, 10))):
        assert torch.equal(state["model/constant"], before)


def test_all_have_the_same_bits_after_an_average() -> None:
    for model, recipe, sizes in (
        (normed, NESTEROV, (7, 8, 9)),
        (Sometimes, constant(optimizer="adam", lr=0.01), (7, 8, 2, 9)),
    ):
        (first, _), *rest = together(3, model, recipe, batches(sizes))
        for state, _ in rest:
            assert state.keys() == first.keys()
            for name, tensor in first.items():
                assert torch.equal(state[name], tensor), name


def test_memory_of_a_parameter_that_others_used_first() -> None:
    """Adam creates its state at the first gradient: a worker without one gets the mean of the others."""
    adam = constant(optimizer="adam", lr=0.01)
    inputs = torch.full((4, FEATURES), 0.1, dtype=torch.float64)
    inputs[0, 0] = 2.0  # the rare branch, at worker 0 only
    data = [Batch(inputs, torch.tensor([0, 1, 2, 0]))] * 2
    (first, _), (second, _) = together(2, Sometimes, adam, data)
    assert first["optimizer/step/rare.weight"].item() == 2
    assert first["optimizer/exp_avg/rare.weight"].abs().max() > 0
    assert "optimizer/exp_avg/never.weight" not in first
    assert second["optimizer/step/rare.weight"].item() == 2


def test_steps_are_counted_where_a_worker_had_no_sample() -> None:
    data = batches((6, 1, 1, 6))
    for state, _ in together(3, plain, constant(optimizer="adam", lr=0.01), data):
        assert {t.item() for name, t in state.items() if name.startswith("optimizer/step/")} == {4.0}


# ---- more steps than one: iterates by hand


class Hand:
    """Local SGD, DiLoCo and EASGD on the quadratic, by their formulas alone."""

    def __init__(self, h: Array, workers: int, momentum: float = 0.0) -> None:
        self.h, self.momentum, self.workers = h, momentum, workers
        self.x, self.v = np.zeros((workers, len(h))), np.zeros((workers, len(h)))
        self.used = np.zeros(workers)
        self.anchor, self.velocity, self.center = np.zeros_like(h), np.zeros_like(h), np.zeros_like(h)

    def step(self, shares: Sequence[Array], lr: float) -> None:
        for rank, part in enumerate(shares):
            if len(part):
                gradient = self.h * (self.x[rank] - part.mean(axis=0))
                self.v[rank] = self.momentum * self.v[rank] + gradient
                self.x[rank] = self.x[rank] - lr * self.v[rank]
                self.used[rank] += len(part)

    def mean(self, what: Array) -> Array:
        weights = self.used / self.used.sum()
        return (weights[:, None] * what).sum(axis=0)

    def average(self) -> None:
        self.x[:], self.v[:] = self.mean(self.x), self.mean(self.v)
        self.used[:] = 0

    def diloco(self, lr: float, momentum: float, averages_inner: bool = False) -> None:
        gradient = self.anchor - self.mean(self.x)
        self.velocity = momentum * self.velocity + gradient
        self.anchor = self.anchor - lr * (gradient + momentum * self.velocity)
        self.x[:] = self.anchor
        if averages_inner:
            self.v[:] = self.mean(self.v)
        self.used[:] = 0

    def easgd(self, a: float) -> None:
        apart = self.x - self.center
        self.x, self.center = self.x - a * apart, self.center + a * apart.sum(axis=0)
        self.used[:] = 0


DIMENSIONS = 4
DATA, STIFFNESS = points(60, DIMENSIONS), stiffness(DIMENSIONS, 10.0)
LOSS = find.build("quadratic", {"n": 60, "dimensions": DIMENSIONS}).loss
Step = tuple[list[Array], float]  # every worker's samples, and the rate


def some_steps(workers: int, count: int, seed: int = 0) -> list[Step]:
    """Random uneven shares, some of them empty but never all, and a rate that changes."""
    generator = np.random.default_rng(seed)
    steps = []
    for number in range(count):
        sizes = generator.integers(0, 5, workers)
        sizes[generator.integers(workers)] += 1
        rows = generator.choice(len(DATA), sizes.sum(), replace=False)
        steps.append((list(np.split(DATA[rows], np.cumsum(sizes)[:-1])), 0.3 / (1 + number)))
    return steps


def walk(
    workers: int, steps: list[Step], options: AverageOptions, momentum: float = 0.0, epoch: int = 0
) -> list[list[tuple[Array, Array]]]:
    """By rank and step: a worker's own weights, and what all have learned together."""
    group = ThreadGroup(workers, timeout=20)
    recipe = constant(lr=0.1, momentum=momentum)
    setups = [
        SynchronousSetup(
            model=Displacement(DIMENSIONS).double(),
            recipe=recipe,
            compute=Compute(LOSS),
            transport=group.transport(rank),
            options=options,
            epoch=epoch,
        )
        for rank in range(workers)
    ]

    def work(transport: Transport) -> list[tuple[Array, Array]]:
        worker, path = Average(setups[transport.rank]), []
        weight: Any = worker.model.weight
        for shares, lr in steps:
            mine, total = torch.from_numpy(shares[transport.rank]), sum(map(len, shares))
            parts = [Batch(mine, torch.zeros(len(mine)))] if len(mine) else []
            worker.step(parts, total, lr)
            own = weight.detach().numpy().copy()
            with worker.consolidated():
                path.append((own, weight.detach().numpy().copy()))
        return path

    return group.run(work)


def check(
    paths: list[list[tuple[Array, Array]]], number: int, own: Array, learned: Array, tolerance: float = 1e-14
) -> None:
    for rank, path in enumerate(paths):
        assert np.abs(path[number][0] - own[rank]).max() < tolerance, (rank, number)
        assert np.abs(path[number][1] - learned).max() < tolerance, (rank, number)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_four_steps_by_hand(workers: int, momentum: float) -> None:
    steps = some_steps(workers, 11)
    paths, hand = walk(workers, steps, AverageOptions(every=4), momentum), Hand(STIFFNESS, workers, momentum)
    for number, (shares, lr) in enumerate(steps):
        hand.step(shares, lr)
        learned = hand.mean(hand.x)
        if (number + 1) % 4 == 0:
            hand.average()
        check(paths, number, hand.x, learned)


@settings(max_examples=25)
@given(
    workers=st.integers(1, 4),
    every=st.integers(1, 5),
    momentum=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 10_000),
)
def test_the_average_of_any_split_is_the_mean_by_samples(
    workers: int, every: int, momentum: float, seed: int
) -> None:
    steps = some_steps(workers, every, seed)
    paths = walk(workers, steps, AverageOptions(every=every), momentum)
    hand = Hand(STIFFNESS, workers, momentum)
    for shares, lr in steps:
        hand.step(shares, lr)
    mean = hand.mean(hand.x)
    for path in paths:
        assert np.abs(path[-1][0] - mean).max() < 1e-14


def test_shares_of_one_and_nine_weigh_one_and_nine() -> None:
    steps = [([DATA[:1], DATA[1:10]], 0.5)]
    paths = walk(2, steps, EVERY_STEP)
    ones, nines = (0.5 * STIFFNESS * part.mean(axis=0) for part in steps[0][0])
    for path in paths:
        assert np.abs(path[0][0] - (0.1 * ones + 0.9 * nines)).max() < 1e-15


def test_once_per_epoch() -> None:
    steps: list[Step] = [([DATA[:3], DATA[3:size]], 0.1) for size in (6, 6, 5, 6, 6, 5, 6)]
    paths, hand = walk(2, steps, AverageOptions(every="epoch"), epoch=17), Hand(STIFFNESS, 2)
    for number, (shares, lr) in enumerate(steps):
        hand.step(shares, lr)
        learned = hand.mean(hand.x)
        if number in (2, 5):
            hand.average()
        check(paths, number, hand.x, learned)


def test_only_at_the_end() -> None:
    steps = some_steps(2, 40)
    paths, hand = walk(2, steps, AverageOptions(every="end")), Hand(STIFFNESS, 2)
    for number, (shares, lr) in enumerate(steps):
        hand.step(shares, lr)
        check(paths, number, hand.x, hand.mean(hand.x))


def test_post_local_is_synchronous_until_the_rate_first_falls() -> None:
    rates = [0.1, 0.2, 0.3, 0.3, 0.1, 0.1, 0.1, 0.4, 0.1]  # falls at step 4, and rises again later
    steps = [(shares, lr) for (shares, _), lr in zip(some_steps(3, 9), rates, strict=True)]
    paths, hand = walk(3, steps, AverageOptions(every=3, post_local=True)), Hand(STIFFNESS, 3)
    for number, (shares, lr) in enumerate(steps):
        hand.step(shares, lr)
        learned = hand.mean(hand.x)
        if number < 4 or number == 6:
            hand.average()
        check(paths, number, hand.x, learned)


@pytest.mark.parametrize("averages_inner", [False, True])
def test_diloco_by_hand(averages_inner: bool) -> None:
    """Each worker keeps its own inner momentum, as Douillard et al. have it, unless it was asked for."""
    steps = some_steps(3, 12)
    asked: dict[str, Any] = {"average_optimizer": True} if averages_inner else {}
    options = AverageOptions(every=3, outer="nesterov", outer_lr=0.7, outer_momentum=0.9, **asked)
    paths, hand = walk(3, steps, options, momentum=0.9), Hand(STIFFNESS, 3, momentum=0.9)
    for number, (shares, lr) in enumerate(steps):
        hand.step(shares, lr)
        learned = hand.mean(hand.x)
        if (number + 1) % 3 == 0:
            hand.diloco(0.7, 0.9, averages_inner)
            learned = hand.anchor
        check(paths, number, hand.x, learned)


@pytest.mark.parametrize("averages", [False, True])
def test_diloco_with_rate_1_and_no_momentum_is_the_mean(averages: bool) -> None:
    steps = some_steps(3, 10)
    mean = AverageOptions(every=3, average_optimizer=averages)
    options = mean.model_copy(update={"outer": "nesterov", "outer_lr": 1.0, "outer_momentum": 0.0})
    means = walk(3, steps, mean, momentum=0.9)
    for path, expected in zip(walk(3, steps, options, momentum=0.9), means, strict=True):
        for (own, learned), (other, mean) in zip(path, expected, strict=True):
            assert np.abs(own - other).max() < 1e-14
            assert np.abs(learned - mean).max() < 1e-14


@pytest.mark.parametrize("elasticity", [None, 0.2])
@pytest.mark.parametrize("workers", [1, 3])
def test_easgd_by_hand_and_the_center_is_what_is_learned(workers: int, elasticity: float | None) -> None:
    steps = some_steps(workers, 11)
    options = AverageOptions(every=3, outer="elastic", elasticity=elasticity)
    paths, hand = walk(workers, steps, options, momentum=0.5), Hand(STIFFNESS, workers, momentum=0.5)
    for number, (shares, lr) in enumerate(steps):
        hand.step(shares, lr)
        if (number + 1) % 3 == 0:
            hand.easgd(0.9 / workers if elasticity is None else elasticity)
        check(paths, number, hand.x, hand.center)


def test_clipping_is_by_each_workers_own_gradient() -> None:
    recipe = dataclasses.replace(SGD, clip=1e-3)
    before = {name: tensor.clone() for name, tensor in make(plain).state_dict().items()}
    [data] = batches((9,))
    for rank, (state, _) in enumerate(together(3, plain, recipe, [data])):
        moved = torch.cat([(state[f"model/{name}"] - tensor).flatten() for name, tensor in before.items()])
        assert moved.norm().item() < 0.1 * 1e-3 * (1 + 1e-9), rank  # a mean of three of that length
