"""A state that a strategy wrote passes the check unchanged; what is legitimately infinite is no fault."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from manyhands.engine.checkpoint.storage import MismatchError
from manyhands.engine.checkpoint.tensor_checks import Checking, plainly_named
from manyhands.recipes.members import constant
from manyhands.strategies.base import Compute, Setup
from manyhands.strategies.local_sgd.average import Average
from manyhands.strategies.options import AverageOptions
from manyhands.strategies.single import Single
from manyhands.transports.base import Transport
from manyhands.transports.threads import ThreadGroup
from parity.alike import FEATURES, State, batches, copied, equal, make, share
from parity.test_allreduce import MODELS, MOMENTUM, RECIPES, alone, setup


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", ["plain", "tied and frozen", "sometimes", "strided"])
def test_what_one_worker_wrote_is_taken(model: str, recipe: str) -> None:
    """Parameters that never had a gradient are remembered by no optimizer."""
    state, _, _ = alone(MODELS[model], RECIPES[recipe], batches((8, 6)))
    equal(Checking(make(MODELS[model]), RECIPES[recipe], 1).check(state), state)


@pytest.mark.parametrize("outer", ["mean", "nesterov", "elastic"])
def test_what_local_sgd_wrote_in_the_middle_of_a_round_is_taken(outer: str) -> None:
    options = AverageOptions(every=2, outer=outer)  # type: ignore[arg-type]
    group = ThreadGroup(2, timeout=20)
    setups = [setup(MODELS["plain"], MOMENTUM, group.transport(rank)) for rank in range(2)]

    def work(transport: Transport) -> State:
        made = setups[transport.rank]
        worker = Average(dataclasses.replace(made, options=options))
        for batch in batches((8, 6, 9)):
            worker.step(iter(share(batch, transport.rank, 2, 1)), batch.size, lr=0.1)
        return copied(worker.state())

    state = group.run(work)[0]
    held = "rank" if outer == "nesterov" else "workers"  # DiLoCo's are each rank's own
    assert any(name.startswith(f"{held}/1/optimizer/") for name in state)
    equal(Checking(make(MODELS["plain"]), MOMENTUM, 2).check(state), state)
    with pytest.raises(MismatchError, match=r"^the checkpoint is of 1 workers, but holds (workers|rank)/1/"):
        Checking(make(MODELS["plain"]), MOMENTUM, 1).check(state)
    del state["workers/1/model/0.bias"]
    with pytest.raises(MismatchError, match=r"another model: workers/1/model/0.bias is in only one of them$"):
        Checking(make(MODELS["plain"]), MOMENTUM, 2).check(state)


class Causal(nn.Module):
    """A mask of minus infinity, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 3)
        self.mask = nn.Buffer(torch.triu(torch.full((4, 4), -math.inf), 1))
        self.fixed = nn.Parameter(torch.tensor([0.0, -math.inf]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(x))
        return out


def test_a_mask_may_be_infinite_and_a_statistic_may_not() -> None:
    worker = Single(
        Setup(
            model=Causal(),
            recipe=constant(lr=0.1),
            compute=Compute(nn.functional.cross_entropy),
            transport=ThreadGroup(1).transport(0),
        )
    )
    state = copied(worker.state())
    equal(Checking(Causal(), constant(lr=0.1), 1).check(state), state)
    state["model/norm.running_var"][0] = math.nan
    with pytest.raises(MismatchError, match=r"numbers that are not finite in model/norm.running_var$"):
        Checking(Causal(), constant(lr=0.1), 1).check(state)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer/step/0.bias", torch.tensor(-1.0)),
        ("optimizer/step/0.bias", torch.tensor(math.nan)),
        ("optimizer/step/0.bias", torch.ones(5)),
        ("optimizer/step/0.bias", torch.tensor(3)),
    ],
)
def test_a_count_of_steps_is_one(name: str, value: Tensor) -> None:
    state, _, _ = alone(MODELS["plain"], RECIPES["adam"], batches((8,)))
    with pytest.raises(MismatchError, match=r"optimizer/step/0.bias is not a count of steps$"):
        Checking(make(MODELS["plain"]), RECIPES["adam"], 1).check({**state, name: value})


def test_half_of_adams_memory_is_of_no_use() -> None:
    state, _, _ = alone(MODELS["plain"], RECIPES["adam"], batches((8,)))
    del state["optimizer/exp_avg_sq/0.bias"]
    with pytest.raises(MismatchError, match=r"optimizer/exp_avg_sq/0.bias is in only one of them$"):
        Checking(make(MODELS["plain"]), RECIPES["adam"], 1).check(state)


def test_momentum_that_was_switched_off_is_no_fault() -> None:
    state, _, _ = alone(MODELS["plain"], MOMENTUM, batches((8,)))
    equal(Checking(make(MODELS["plain"]), constant(lr=0.1), 1).check(state), state)


@pytest.mark.parametrize(
    "note", [{"average/used": torch.tensor([3, 4])}, {"average/peak": torch.tensor(-1.0).double()}]
)
def test_impossible_state_of_local_sgd_is_refused(note: State) -> None:
    state, _, _ = alone(MODELS["plain"], MOMENTUM, batches((8,)))
    with pytest.raises(MismatchError, match=r"^the checkpoint's average/(outer|peak) is not a state "):
        Checking(make(MODELS["plain"]), MOMENTUM, 2).check({**state, **note})


def test_names_that_would_clash_stay_as_they_are() -> None:
    clash = {"a._orig_mod.w": torch.zeros(1), "a.w": torch.ones(1)}
    assert plainly_named(clash) == clash
    assert plainly_named({"a._orig_mod.w": clash["a.w"]}).keys() == {"a.w"}
