"""Sparse gradients in strategies: found by identity, refused by name, clipped by their true norm."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from manyhands.core.errors import UsageError
from manyhands.data.base import Batch
from manyhands.recipes.base import Recipe
from manyhands.recipes.members import constant
from manyhands.strategies.base import Compute, SynchronousSetup
from manyhands.strategies.data_parallel.allreduce import AllReduce
from manyhands.strategies.single import Single
from manyhands.strategies.sparse_gradients import refuse, sparse_parameters, total_norm
from manyhands.transports.solo import SoloTransport


class Reader(nn.Module):
    """Words in, two classes out: one sparse embedding and a dense layer."""

    def __init__(self, width: int = 1, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.EmbeddingBag(9, width, mode="sum", sparse=sparse)
        self.last = nn.Linear(width, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(rows))


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        Batch(
            torch.randint(0, 9, (6, 3), generator=generator), torch.randint(0, 2, (6,), generator=generator)
        )
        for _ in range(count)
    ]


def setup(model: nn.Module, recipe: Recipe) -> SynchronousSetup:
    compute = Compute(nn.functional.cross_entropy)
    return SynchronousSetup(model=model, recipe=recipe, compute=compute, transport=SoloTransport())


def test_embeddings_that_say_so_have_sparse_gradients() -> None:
    model = nn.Sequential(
        nn.Embedding(3, 2, sparse=True),
        nn.Sequential(nn.EmbeddingBag(3, 2, sparse=True), nn.Linear(2, 2)),
        nn.Embedding(3, 2),
        nn.EmbeddingBag(3, 2),
    )
    assert sparse_parameters(model) == {"0.weight", "1.0.weight"}
    assert sparse_parameters(nn.Linear(2, 2)) == set()


def test_a_tied_parameter_is_found_under_each_name_and_a_frozen_one_under_none() -> None:
    model = nn.Module()
    model.first = nn.Embedding(3, 2)
    model.second = nn.Embedding(3, 2, sparse=True)
    model.first.weight = model.second.weight
    assert sparse_parameters(model) == {"first.weight", "second.weight"}
    model.second.requires_grad_(False)
    assert sparse_parameters(model) == set()


def test_what_they_name_is_what_backward_makes_sparse() -> None:
    model = Reader(2)
    nn.functional.cross_entropy(model(batches(1)[0].inputs), batches(1)[0].targets).backward()
    found = {name for name, parameter in model.named_parameters() if parameter.grad.is_sparse}
    assert sparse_parameters(model) == found == {"words.weight"}


def test_a_strategy_that_cannot_use_them_says_so() -> None:
    refuse(Reader(sparse=False), "server")
    with pytest.raises(UsageError) as error:
        refuse(Reader(), "server")
    assert str(error.value) == (
        "strategy server exchanges dense gradients, but words.weight has sparse ones: "
        "use single, hogwild or average, or an embedding with sparse=False"
    )


@pytest.mark.parametrize("width", [1, 3])
def test_the_norm_counts_a_row_that_is_named_twice_once(width: int) -> None:
    sparse, whole = Reader(width).double(), Reader(width, sparse=False).double()
    for model in (sparse, whole):
        model(torch.tensor([[1, 1, 4]])).square().sum().backward()
    ours = total_norm([parameter.grad for parameter in sparse.parameters()])
    theirs = nn.utils.get_total_norm([parameter.grad for parameter in whole.parameters()])
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)
    entries = torch.cat([sparse.words.weight.grad._values().flatten()])
    assert entries.norm() < sparse.words.weight.grad.to_dense().norm()  # what is wrong without coalescing


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("recipe", [constant(lr=0.5), constant(lr=0.5, clip=0.1)], ids=["plain", "clipped"])
def test_single_learns_the_same_from_sparse_and_whole_gradients(
    recipe: Recipe, width: int, accumulate: int
) -> None:
    models = [Reader(width).double(), Reader(width, sparse=False).double()]
    workers = [Single(setup(model, recipe)) for model in models]
    for batch in batches(5):
        parts = [
            Batch(*pair)
            for pair in zip(batch.inputs.chunk(accumulate), batch.targets.chunk(accumulate), strict=True)
        ]
        sparse, whole = (worker.step(parts, batch.size, 0.5) for worker in workers)
        assert sparse.loss == pytest.approx(whole.loss, rel=1e-13)
    for name, parameter in models[0].named_parameters():
        torch.testing.assert_close(parameter, models[1].get_parameter(name), rtol=1e-12, atol=1e-14)


def test_single_and_allreduce_learn_the_same_from_sparse_gradients() -> None:
    """The arena makes them whole, and weight decay spares the embedding there too (law 4)."""
    model = Reader(3).double()
    recipe = constant(lr=0.5, weight_decay=0.1, clip=0.5)
    workers = [Single(setup(copy.deepcopy(model), recipe)), AllReduce(setup(copy.deepcopy(model), recipe))]
    for batch in batches(5):
        for worker in workers:
            worker.step([batch], batch.size, 0.5)
    single, other = (dict(worker.model.named_parameters()) for worker in workers)
    for name, parameter in single.items():
        torch.testing.assert_close(parameter, other[name], rtol=1e-12, atol=1e-14)


def test_single_goes_on_from_its_state() -> None:
    recipe = constant(lr=0.5)
    once, again = (Single(setup(Reader().double(), recipe)) for _ in range(2))
    first, second, third = batches(3)
    for batch in (first, second):
        once.step([batch], batch.size, 0.5)
    again.load_state({name: tensor.clone() for name, tensor in once.state().items()})
    for worker in (once, again):
        worker.step([third], third.size, 0.5)
    for name, tensor in once.state().items():
        assert torch.equal(tensor, again.state()[name]), name


def test_single_refuses_momentum_before_any_step() -> None:
    with pytest.raises(UsageError) as error:
        Single(setup(Reader(), constant(momentum=0.9)))
    assert str(error.value) == (
        "sparse gradients (words.weight) need plain sgd without momentum, got sgd with momentum 0.9"
    )
