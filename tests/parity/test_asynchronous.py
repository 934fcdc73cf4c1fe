"""Asynchronous strategies without a race equal one worker exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.data.arrays import ArrayData
from manyhands.data.base import Batch, Request
from manyhands.data.order import Order, split
from manyhands.recipes.base import Recipe
from manyhands.recipes.members import constant, lamb, lars
from manyhands.records.spec import RunSpec
from manyhands.strategies.asynchronous.base import AsynchronousSetup, Work
from manyhands.strategies.asynchronous.hogwild import Hogwild
from manyhands.strategies.asynchronous.parameter_server import QueueServer, SliceServer, server
from manyhands.strategies.asynchronous.server_channel import ServerRequest, Verb
from manyhands.strategies.base import Compute, Setup
from manyhands.strategies.options import ServerOptions
from manyhands.strategies.single import Single
from manyhands.tasks.base import Task
from manyhands.testing.scripted import Played, play
from manyhands.transports.base import Transport
from manyhands.transports.solo import SoloTransport
from manyhands.transports.threads import ThreadGroup

SAMPLES, FEATURES, CLASSES = 50, 6, 3
RECIPES = {
    "sgd": constant(lr=0.1),
    "momentum": constant(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": constant(lr=0.01, optimizer="adam"),
    "lars": lars(lr=0.5, weight_decay=0.01),
    "lamb": lamb(lr=0.05),
    "clipped": constant(lr=0.1, momentum=0.9, clip=0.05),
}


class Sometimes(nn.Module):
    """A branch that some batches do not use, a frozen and a tied parameter, and norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm = nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)
        self.tied, self.rare = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.last = nn.Linear(FEATURES, CLASSES)
        self.tied.weight = self.first.weight
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.tied(torch.tanh(self.norm(self.first(x))))))
        return out + self.rare(x) if x[0, 0] > 0.5 else out


def task(model: Any = Sometimes) -> Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    data = ArrayData(inputs, torch.randint(0, CLASSES, (SAMPLES,), generator=generator))
    return Task(
        name="t", model=model, train=data, test=data, loss=nn.functional.cross_entropy, target=2.0,
        evaluation_batch=7,
    )  # fmt: skip


def run(
    make: Any, recipe: Recipe, strategy: str, workers: int, model: Any = Sometimes, **fields: Any
) -> Played:
    spec = RunSpec(
        task="t",
        strategy=strategy,
        workers=workers,
        batch=fields.pop("batch", 8),
        epochs=2,
        target=2.0,
        evaluate_every=fields.pop("evaluate_every", 1.0),
        **fields,
    )
    return play(make, task(model), recipe, spec, [])


def reference(
    recipe: Recipe, batch: int, model: Any = Sometimes, parts: int = 1, accumulate: int = 1
) -> tuple[dict[str, Tensor], list[float]]:
    """One worker over the same batches, or over the pieces of them one after the other."""
    of = task(model)
    setup = Setup(
        model=of.model().double(), recipe=recipe, compute=Compute(of.loss), transport=SoloTransport()
    )
    worker = Single(setup)
    order, losses, samples = Order(SAMPLES, batch, 0), [], 0
    for request in order.batches():
        if samples >= 2 * SAMPLES:
            break
        for piece in split(request.samples, parts):
            if not len(piece):
                continue
            requests = [Request(request.epoch, micro) for micro in split(piece, accumulate) if len(micro)]
            batches: list[Batch] = list(of.train.stream(requests, 0))
            losses.append(worker.step(batches, len(piece), recipe.lr).loss)
            samples += len(piece)
    return {name: tensor.clone() for name, tensor in worker.state().items()}, losses


def same(played: Played, state: dict[str, Tensor], losses: list[float], tolerance: float = 1e-12) -> None:
    assert played.state.keys() == state.keys()
    for name, tensor in state.items():
        assert (played.state[name].double() - tensor.double()).abs().max().item() <= tolerance, name
    assert [step.loss for step in played.steps] == pytest.approx(losses, abs=tolerance)


@pytest.mark.parametrize("name", RECIPES)
def test_hogwild_alone_is_one_worker(name: str) -> None:
    same(run(Hogwild, RECIPES[name], "hogwild", 1), *reference(RECIPES[name], 8))


@pytest.mark.parametrize("name", RECIPES)
def test_a_server_with_one_worker_is_one_worker(name: str) -> None:
    """It waits for its own update before it pulls, so nothing is ever stale."""
    played = run(server, RECIPES[name], "server", 1)
    same(played, *reference(RECIPES[name], 8))
    assert {step.staleness for step in played.steps} == {0}


@pytest.mark.parametrize("name", ["momentum", "adam", "clipped"])
@pytest.mark.parametrize("servers", [2, 3])
def test_several_servers_are_one(name: str, servers: int) -> None:
    played = run(server, RECIPES[name], "server", 1, strategy_options={"servers": servers})
    same(played, *reference(RECIPES[name], 8))


@pytest.mark.parametrize("strategy", [Hogwild, server])
def test_accumulated_micro_batches(strategy: Any) -> None:
    name = "hogwild" if strategy is Hogwild else "server"
    played = run(strategy, RECIPES["momentum"], name, 1, accumulate=3, batch=10)
    same(played, *reference(RECIPES["momentum"], 10, accumulate=3))


def plain() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_rounds_that_wait_for_everybody_are_synchronous(name: str, workers: int) -> None:
    """Backup 0: the mean over each global batch (law 4), whichever worker had which piece of it."""
    played = run(server, RECIPES[name], "server", workers, plain, strategy_options={"backup": 0})
    state, _ = reference(RECIPES[name], 8, plain)
    for key, tensor in state.items():
        assert (played.state[key] - tensor).abs().max().item() <= 1e-12, key
    assert sum(share.samples for share in played.shares) == 2 * SAMPLES
    assert all(share.dropped == 0 for share in played.shares)


def test_a_round_includes_what_only_one_worker_used() -> None:
    """The mean over all samples (law 4) for a branch that some micro-batches use: a round is one batch."""
    recipe = RECIPES["momentum"]
    played = run(server, recipe, "server", 2, batch=10, strategy_options={"backup": 0})
    state, _ = reference(recipe, 10, accumulate=2)
    trained = [name for name in state if "norm.running" not in name and "num_batches" not in name]
    assert any("rare" in name for name in trained)
    for name in trained:
        assert (played.state[name] - state[name]).abs().max().item() <= 1e-12, name


@pytest.mark.parametrize("made", [plain, Sometimes])
def test_pushing_and_pulling_now_and_then_is_downpour(made: Callable[[], nn.Module]) -> None:
    """One worker that pushes the sum of two gradients and pulls every second step, by hand."""
    recipe = RECIPES["sgd"]
    options = {"push_every": 2, "pull_every": 2}
    played = run(server, recipe, "server", 1, made, strategy_options=options, batch=10, evaluate_every=9.0)
    by_hand(
        played, made, batch=10, pushes=lambda number: number % 2 == 1, pulls=lambda number: number % 2 == 1
    )
    assert [step.staleness for step in played.steps] == [None, 0] * 5


def test_gradients_that_are_held_are_pushed_before_a_sync_point() -> None:
    """Four pieces per epoch, pushed by threes: the fourth is pushed before the evaluation."""
    options = {"push_every": 3}
    played = run(server, RECIPES["sgd"], "server", 1, strategy_options=options, batch=15)
    by_hand(played, Sometimes, 15, pushes=lambda number: number % 4 >= 2, pulls=lambda number: True)


def by_hand(
    played: Played,
    made: Callable[[], nn.Module],
    batch: int,
    pushes: Callable[[int], bool],
    pulls: Callable[[int], bool],
) -> None:
    """Downpour (DistBelief, algorithm 7.1) with one worker, which pushes and pulls after these steps."""
    of, lr = task(made), RECIPES["sgd"].lr
    model, kept = of.model().double(), of.model().double()  # the worker's copy, the server's
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    samples = 0
    for number, request in enumerate(Order(SAMPLES, batch, 0).batches()):
        if samples >= 2 * SAMPLES:
            break
        samples += len(request.samples)
        (piece,) = of.train.stream([request], 0)
        model.zero_grad()
        of.loss(model(piece.inputs), piece.targets).backward()
        with torch.no_grad():
            for total, mine, theirs in zip(sums, model.parameters(), kept.parameters(), strict=True):
                if mine.grad is not None:
                    total.add_(mine.grad)
                    mine.sub_(lr * mine.grad)
                if pushes(number):
                    theirs.sub_(lr * total)
                    total.zero_()
                if pulls(number):
                    mine.copy_(theirs)
    expected = {**kept.state_dict(), **dict(model.named_buffers())}  # one worker: buffers are its own
    for name, tensor in expected.items():
        assert (played.state[f"model/{name}"] - tensor).abs().max().item() <= 1e-12, name


@pytest.mark.parametrize(("push", "pull"), [(1, 1), (1, 3), (2, 2), (2, 3), (3, 1), (3, 2)])
@pytest.mark.parametrize("workers", [1, 2])
def test_every_batch_is_counted_once_in_the_buffers(workers: int, push: int, pull: int) -> None:
    """Whenever buffers are pushed and pulled: changes are neither lost nor added twice."""
    options = {"push_every": push, "pull_every": pull}
    played = run(server, RECIPES["sgd"], "server", workers, batch=10, strategy_options=options)
    assert int(played.state["model/norm.num_batches_tracked"]) == len(played.steps) == 10 * workers


@pytest.mark.parametrize("servers", [1, 2])
def test_a_loaded_state_is_what_the_servers_hold(servers: int) -> None:
    """Parameters, buffers and momentum, in each server's slice."""
    recipe, of = RECIPES["momentum"], task()
    state, _ = reference(recipe, 8)
    order = Order(SAMPLES, 8, 0)

    def load(transport: Transport) -> dict[str, Tensor] | None:
        rank = server(
            AsynchronousSetup(
                model=of.model().double(),
                recipe=recipe,
                compute=Compute(of.loss),
                transport=transport,
                options=ServerOptions(servers=servers),
                work=Work(order, 1, len(of.test), 7),
            )
        )
        rank.load_state(state)
        if isinstance(rank, SliceServer):
            rank.serve(lambda: None)
        if isinstance(rank, QueueServer):
            found = rank.state()
            for other in range(1, servers):
                rank._channel.ask(other, ServerRequest(Verb.LEAVE))
            return found
        return None

    found = ThreadGroup(servers + 1, timeout=60).run(load)[0]
    assert found is not None
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name
