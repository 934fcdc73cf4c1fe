"""The conformance suite of synchronous strategies with one worker: subclass it and set `strategy`."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from manyhands.data.base import Batch
from manyhands.recipes.base import Recipe
from manyhands.recipes.members import constant
from manyhands.strategies.base import Compute, PartitionedSetup, Worker
from manyhands.transports.solo import SoloTransport


def network() -> nn.Sequential:
    """A small model with what easily goes wrong: a norm's buffers, a frozen and a tied parameter."""
    torch.manual_seed(1)
    first, tied = nn.Linear(6, 6), nn.Linear(6, 6)
    tied.weight = first.weight
    model = nn.Sequential(first, nn.BatchNorm1d(6), nn.Tanh(), tied, nn.Linear(6, 3)).double()
    model[4].bias.requires_grad_(False)
    return model


def batch(size: int, seed: int = 0) -> Batch:
    """Random samples of three classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 6, dtype=torch.float64, generator=generator)
    return Batch(inputs, torch.randint(0, 3, (size,), generator=generator))


class StrategySuite:
    """Contract tests of a strategy's worker."""

    strategy: ClassVar[Any]
    tolerance = 1e-12

    def worker(self, model: nn.Module, recipe: Recipe) -> Worker:
        """One worker around a model."""
        setup = PartitionedSetup(
            model=model,
            recipe=recipe,
            compute=Compute(nn.functional.cross_entropy),
            transport=SoloTransport(),
            batch=8,
            example=batch,
        )
        made: Worker = self.strategy(setup)
        return made

    def test_a_step_is_plain_sgd_on_the_mean(self) -> None:
        """Against the formula: w - lr (mean gradient), every tensor."""
        model, data = network(), batch(9)
        reference = copy.deepcopy(model)
        nn.functional.cross_entropy(reference(data.inputs), data.targets).backward()  # type: ignore[no-untyped-call]
        worker = self.worker(model, constant(lr=0.1))
        worker.step([data], data.size, lr=0.1)
        for name, parameter in reference.named_parameters():
            moved = parameter if parameter.grad is None else parameter - 0.1 * parameter.grad
            self.close(dict(worker.model.named_parameters())[name], moved, name)

    def test_uneven_micro_batches_are_the_whole_batch(self) -> None:
        """Law 4, on a model whose forward treats samples one by one."""
        data = batch(10)
        parts = [Batch(data.inputs[a:b], data.targets[a:b]) for a, b in ((0, 1), (1, 7), (7, 10))]
        one, many = (self.worker(nn.Linear(6, 3).double(), constant(lr=0.5)) for _ in range(2))
        many.load_state(one.state())
        losses = one.step([data], 10, lr=0.5).loss, many.step(parts, 10, lr=0.5).loss
        assert abs(losses[0] - losses[1]) < self.tolerance
        for name, tensor in one.state().items():
            self.close(many.state()[name], tensor, name)

    def test_the_loss_returned_is_the_mean_before_the_update(self) -> None:
        """As the record defines it."""
        model, data = network(), batch(5)
        expected = nn.functional.cross_entropy(copy.deepcopy(model)(data.inputs), data.targets).item()
        outcome = self.worker(model, constant(lr=1.0)).step([data], 5, lr=1.0)
        assert abs(outcome.loss - expected) < self.tolerance

    def test_state_round_trip_continues_bit_for_bit(self) -> None:
        """With momentum, norm buffers, frozen and tied parameters."""
        recipe = constant(lr=0.1, momentum=0.9)
        worker = self.worker(network(), recipe)
        worker.step([batch(8, 0)], 8, lr=0.1)
        other = self.worker(network(), recipe)
        other.load_state({name: tensor.clone() for name, tensor in worker.state().items()})
        for step in (1, 2):
            for each in (worker, other):
                each.step([batch(8, step)], 8, lr=0.05)
        for name, tensor in worker.state().items():
            assert torch.equal(tensor, other.state()[name]), name

    def test_clipping_bounds_the_whole_gradient(self) -> None:
        """The update's norm is the learning rate times the bound."""
        model = network()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        self.worker(model, constant(lr=1.0, clip=1e-3)).step([batch(8)], 8, lr=1.0)
        moved = torch.cat([(a - b).flatten() for a, b in zip(model.parameters(), before, strict=True)])
        assert abs(moved.norm().item() - 1e-3) < 1e-8

    def close(self, actual: Tensor, expected: Tensor, name: str) -> None:
        """Equal within the stated tolerance."""
        difference = (actual - expected).abs().max().item() if actual.numel() else 0.0
        assert difference <= self.tolerance, f"{name} differs by {difference}"
