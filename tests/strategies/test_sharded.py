"""The sharded strategy by itself: alone it is one worker, and how it divides a model."""

from __future__ import annotations

import torch
from torch import nn

from manyhands.recipes.members import constant
from manyhands.strategies.base import Compute, PartitionedSetup
from manyhands.strategies.sharded.worker import _units, _without_values, sharded
from manyhands.strategies.single import Single
from manyhands.testing.strategies import StrategySuite, batch, network
from manyhands.transports.solo import SoloTransport


class TestSharded(StrategySuite):
    strategy = staticmethod(sharded)

    def test_alone_it_is_single(self) -> None:
        assert type(self.worker(network(), constant(lr=0.1))) is Single

    def test_alone_it_takes_sparse_gradients(self) -> None:
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(3, 2))
        setup = PartitionedSetup(
            model=model,
            recipe=constant(lr=0.1),
            compute=Compute(nn.functional.cross_entropy),
            transport=SoloTransport(),
            batch=2,
            example=batch,
        )
        assert type(sharded(setup)) is Single


class Named(nn.Module):
    """Names its blocks; a scale of its own belongs to none of them."""

    def __init__(self, made_up: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.made_up = made_up

    def blocks(self) -> list[nn.Module]:
        return [nn.Sequential(self.first, self.last)] if self.made_up else [self.first, self.last]


def test_a_model_is_divided_into_its_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert _units(model) == ([model[0], model[2], model], set())
    named = Named()
    assert _units(named) == ([named.first, named.last, named], {named.scale})


def test_blocks_that_share_or_are_not_the_models_own_are_gathered_together() -> None:
    tied = network()
    assert _units(tied) == ([tied], set())
    made_up = Named(made_up=True)  # an unlikely name for a block
    assert _units(made_up)[0] == [made_up]
    no_sequence = nn.Bilinear(2, 2, 2)
    assert _units(no_sequence)[0] == [no_sequence]


def test_what_cannot_be_sharded_with_the_rest_is_left_out() -> None:
    model = nn.Module()
    model.most, model.other = nn.Parameter(torch.zeros(9, 2)), nn.Parameter(torch.zeros(3).double())
    model.scalar, model.empty = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(0, 2))
    model.frozen = nn.Parameter(torch.zeros(3).double(), requires_grad=False)
    assert _units(model)[1] == {model.other, model.scalar, model.empty}


def test_a_without_values_copy_has_the_same_buffers_ties_and_names() -> None:
    model = network()
    copy = _without_values(model)
    assert copy[1].running_mean is model[1].running_mean
    assert copy[0].weight is copy[3].weight
    assert [name for name, _ in copy.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(parameter.numel() == 0 for parameter in copy.parameters())
    assert not copy[4].bias.requires_grad
