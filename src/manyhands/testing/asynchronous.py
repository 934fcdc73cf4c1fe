"""The conformance suite of asynchronous strategies: subclass it and set `strategy` and `name`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from manyhands.data.arrays import ArrayData
from manyhands.data.order import Order
from manyhands.recipes.members import constant
from manyhands.records.spec import RunSpec
from manyhands.strategies import STRATEGIES
from manyhands.strategies.base import Compute, Setup
from manyhands.strategies.single import Single
from manyhands.tasks.base import Task
from manyhands.testing.scripted import Played, Turn, play
from manyhands.testing.strategies import batch, network
from manyhands.transports.solo import SoloTransport

SAMPLES, EPOCHS = 50, 2


def plain() -> nn.Module:
    """A model that takes a single sample."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def task(model: Callable[[], nn.Module]) -> Task:
    """Three classes."""
    data = ArrayData(*batch(SAMPLES))
    return Task(name="t", model=model, train=data, test=data, loss=nn.functional.cross_entropy, target=2.0)


class AsyncSuite:
    """Contract tests of an asynchronous strategy."""

    strategy: ClassVar[Any]
    name: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    tolerance = 1e-12

    def run(self, workers: int, turns: list[Turn] | None = None) -> Played:
        """Train two epochs in threads, by script if `turns` is given."""
        spec = RunSpec(
            task="t",
            strategy=self.name,
            strategy_options=self.options,
            workers=workers,
            batch=8,
            epochs=EPOCHS,
            target=2.0,
        )
        # three workers get single samples of a ragged batch, which a norm cannot use
        of = task(network if workers == 1 else plain)
        return play(type(self).strategy, of, constant(lr=0.05, momentum=0.5), spec, turns or [])

    def test_alone_it_is_one_worker(self) -> None:
        """Tensor by tensor: norms, frozen and tied parameters, momentum, a ragged last batch."""
        of, order = task(network), Order(SAMPLES, 8, 0)
        worker = Single(
            Setup(
                model=network(),
                recipe=constant(lr=0.05, momentum=0.5),
                compute=Compute(of.loss),
                transport=SoloTransport(),
            )
        )
        samples = 0
        for request in order.batches():
            if samples >= EPOCHS * SAMPLES:
                break
            (data,) = of.train.stream([request], 0)
            worker.step([data], data.size, 0.05)
            samples += data.size
        played, expected = self.run(1), worker.state()
        assert played.state.keys() == expected.keys()
        for name, tensor in expected.items():
            difference = (played.state[name].double() - tensor.double()).abs().max().item()
            assert difference <= self.tolerance, f"{name} differs by {difference}"

    def test_every_sample_is_used_once_per_epoch(self) -> None:
        """Three workers, at any speeds."""
        played = self.run(3)
        assert sum(share.samples for share in played.shares) == EPOCHS * SAMPLES
        assert played.steps[-1].samples == EPOCHS * SAMPLES
        assert [step.step for step in played.steps] == list(range(1, len(played.steps) + 1))
        assert all(torch.isfinite(tensor).all() for tensor in played.state.values())

    def test_the_test_set_is_evaluated_once_per_epoch(self) -> None:
        """After the last update before the sync point, by any worker."""
        evaluated = [step.samples for step in self.run(3).steps if step.metric is not None]
        assert evaluated == [SAMPLES, 2 * SAMPLES]

    def test_the_lease_of_a_dead_worker_goes_to_another(self) -> None:
        """It dies while it holds a lease."""
        servers = int(self.options.get("servers", 1)) if STRATEGIES[self.name].serves else 0
        ranks = range(servers, servers + 3)
        last = ranks[-1]
        played = self.run(3, [*((rank, "start") for rank in ranks), (last, "die")])
        assert sum(share.samples for share in played.shares) == EPOCHS * SAMPLES
        assert played.shares[last].samples == 0
        assert [who.split(" after")[0] for who in played.lost] == [f"worker {last}"]
