"""The sharded strategy equals one worker tensor by tensor: real processes on gloo, many checks per group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.core.errors import UsageError
from manyhands.data.base import Batch
from manyhands.engine.timing.traffic import CountingTransport
from manyhands.recipes.base import Recipe
from manyhands.recipes.members import constant
from manyhands.strategies.base import Votes
from manyhands.strategies.sharded.worker import Sharded
from manyhands.strategies.single import Single
from manyhands.transports.base import Transport
from manyhands.transports.broadcast import broadcast_tensors
from manyhands.transports.solo import SoloTransport
from manyhands.transports.torch_ import TorchTransport
from parity.alike import (
    CLASSES,
    FEATURES,
    Made,
    Sparse,
    State,
    batches,
    close,
    copied,
    held,
    normed,
    plain,
    share,
)
from parity.test_allreduce import MODELS, MOMENTUM, RECIPES, alone, drive, setup
from transports.groups import processes

Model = Callable[[], nn.Module]
SIZES = (9, 10, 2, 7)  # uneven, and once fewer samples than workers


def writes_over_inputs() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)), nn.Linear(8, CLASSES)
    )


def hands_on_views() -> nn.Module:
    def viewing(size: int) -> nn.Module:
        return nn.Sequential(nn.Linear(size, 8), nn.Unflatten(1, (2, 4)), nn.Flatten())

    return nn.Sequential(
        viewing(FEATURES), nn.ReLU(inplace=True), viewing(8), nn.ReLU(inplace=True), nn.Linear(8, CLASSES)
    )


def mostly_frozen() -> nn.Module:
    model = nn.Sequential(plain(), nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES))
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    return model


class Odd(nn.Module):
    """An empty parameter and one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.integers = nn.Parameter(torch.arange(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


def normed_rows() -> nn.Module:
    """A norm that takes even one sample, and dropout."""
    return nn.Sequential(
        nn.Unflatten(1, (2, 3)),
        nn.BatchNorm1d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(FEATURES, CLASSES),
    )


KINDS: dict[str, Model] = {
    **MODELS,
    "writes over inputs": writes_over_inputs,
    "hands on views": hands_on_views,
    "mostly frozen": mostly_frozen,
    "odd": Odd,
}
CASES: dict[str, tuple[Model, Recipe, int]] = {
    **{f"plain by {name}": (plain, recipe, 1) for name, recipe in RECIPES.items()},
    **{f"{name}, accumulated": (model, MOMENTUM, 2) for name, model in KINDS.items()},
    "sometimes by lamb": (MODELS["sometimes"], RECIPES["lamb"], 3),
    "sometimes, clipped": (MODELS["sometimes"], dataclasses.replace(MOMENTUM, clip=0.3), 2),
    "plain, clipped adamw": (plain, dataclasses.replace(RECIPES["adamw"], clip=1e-3), 3),
}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def sharded(
    model: Model, recipe: Recipe, transport: Transport, accumulate: int = 1, state: State | None = None
) -> tuple[State, list[float]]:
    return drive(Sharded(setup(model, recipe, transport)), transport, batches(SIZES), accumulate, state)[:2]


def three(transport: Transport) -> dict[str, Any]:
    """Everything that three workers are asked."""
    found: dict[str, Any] = {
        name: sharded(model, recipe, transport, accumulate)
        for name, (model, recipe, accumulate) in CASES.items()
    }
    found["whole"] = consolidated_and_final(transport)
    found["without samples"] = without_samples(transport)
    return found


def consolidated_and_final(transport: Transport) -> dict[str, Any]:
    """Evaluate as often as each rank likes between two steps, and finalize at the end."""
    worker = Sharded(setup(normed, MOMENTUM, transport))
    [first, second, few] = batches((9, 12, 4))
    worker.step(iter(share(first, transport.rank, 3, 1)), 9, 0.1)
    before = held(worker, transport.rank, shards=True)
    outputs = torch.empty(0)
    with worker.consolidated(), torch.inference_mode():
        inside = [type(tensor) for tensor in worker.model.state_dict().values()]
        worker.model.eval()
        for _ in range(2 * transport.rank + 1):
            outputs = worker.model(few.inputs).clone()
        worker.model.train()
    again = held(worker, transport.rank, shards=True)
    unchanged = before.keys() == again.keys() and all(torch.equal(before[n], t) for n, t in again.items())
    worker.step(iter(share(second, transport.rank, 3, 1)), 12, 0.1)
    rows = sum(parameter.to_local().numel() for parameter in worker.model.parameters())
    worker.finalize()
    kept = dict(worker.model.state_dict())
    return {
        "outputs": torch.tensor(outputs.tolist(), dtype=torch.float64),
        "types": {*inside, *(type(tensor) for tensor in kept.values())},
        "unchanged": unchanged,
        "before": before,
        "held": rows,
        "kept": copied(kept),
        "state": held(worker, transport.rank, shards=True),
    }


def without_samples(transport: Transport) -> dict[str, Any]:
    """One sample for three workers, as the first batch of all: who has none takes an example."""
    made = setup(normed_rows, MOMENTUM, transport)
    [data] = batches((1,))
    example = Batch(torch.full((1, FEATURES), 7.0, dtype=torch.float64), torch.tensor([0]))
    worker = Sharded(dataclasses.replace(made, example=lambda size: example))
    before = torch.get_rng_state()
    worker.step(iter(share(data, transport.rank, 3, 1)), 1, 0.1)
    drawn = not torch.equal(before, torch.get_rng_state())
    return {
        "drawn": drawn,
        "training": worker.model.training,
        "state": held(worker, transport.rank, shards=True),
    }


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 300), nn.Tanh(), nn.Linear(300, CLASSES))


def largest_made(transport: Transport) -> tuple[int, int]:
    """How many tensors a state has here, and the numbers of the largest tensor that was made for it."""
    worker = Sharded(setup(wide, MOMENTUM, transport))
    with Made() as made:
        state = worker.state()
    return len(state), made.largest


def two(transport: Transport) -> dict[str, Any]:
    """What two workers are asked."""
    rank, data = transport.rank, batches(SIZES)
    counting = CountingTransport(transport)
    made = setup(plain, MOMENTUM, counting)
    torch.manual_seed(rank)  # all workers take rank 0's values
    for parameter in made.model.parameters():
        nn.init.normal_(parameter)
    worker = Sharded(made)
    start = held(worker, rank, shards=True)
    for batch in data[:2]:
        outcome = worker.step(iter(share(batch, rank, 2, 1)), batch.size, 0.1, lambda: Votes(stop=rank == 1))
    half = held(worker, rank, shards=True)
    traffic = {name: each.calls for name, each in counting.traffic.items()}
    # the same from a saved state
    other = Sharded(setup(plain, MOMENTUM, transport))
    other.load_state(broadcast_tensors(transport, half if rank == 0 else None)[0])
    for each in (worker, other):
        for batch in data[2:]:
            each.step(iter(share(batch, rank, 2, 2)), batch.size, 0.1)
    try:
        Sharded(setup(Sparse, MOMENTUM, transport))
        refused = ""
    except UsageError as error:
        refused = str(error)
    return {
        "start": start,
        "half": half,
        "end": held(worker, rank, shards=True),
        "resumed": held(other, rank, shards=True),
        "votes": outcome.votes,
        "traffic": traffic,
        "choices": made.choices["sharded"],
        "refused": refused,
        "made": largest_made(transport),
        "normed": drive(Sharded(setup(normed, MOMENTUM, transport)), transport, batches((9, 12, 10)), 1)[:2],
        "from single": sharded(plain, RECIPES["adamw"], transport, 1, FROM_SINGLE),
        "one step": drive(
            Sharded(setup(normed, constant(lr=0.0001), transport)), transport, batches((7,)), 1
        )[0],
    }


FROM_SINGLE = alone(plain, RECIPES["adamw"], batches((5, 8)))[0]


@pytest.fixture(scope="module")
def of_three() -> list[dict[str, Any]]:
    return processes(TorchTransport, ("here",) * 3, three)


@pytest.fixture(scope="module")
def of_two() -> list[dict[str, Any]]:
    return processes(TorchTransport, ("here",) * 2, two)


@pytest.mark.parametrize("case", CASES)
def test_it_equals_one_worker(case: str, of_three: list[dict[str, Any]]) -> None:
    model, recipe, _ = CASES[case]
    expected, losses, _ = alone(model, recipe, batches(SIZES))
    for found in of_three:
        state, own = found[case]
        close(state, expected, 1e-6 if "mixed" in case else 1e-11)
        assert own == pytest.approx(losses, abs=1e-7 if "mixed" in case else 1e-12)


def test_consolidated_every_worker_has_the_whole_model_without_exchanges(
    of_three: list[dict[str, Any]],
) -> None:
    worker = Single(setup(normed, MOMENTUM, SoloTransport()))
    worker.load_state(of_three[0]["whole"]["before"])
    expected = worker.model.eval()(batches((9, 12, 4))[2].inputs)
    for found in (each["whole"] for each in of_three):
        assert found["types"] == {Tensor}
        assert found["unchanged"]
        assert torch.equal(found["outputs"], expected)


def test_the_final_model_is_whole_and_plain(of_three: list[dict[str, Any]]) -> None:
    numbers = sum(parameter.numel() for parameter in normed().parameters())
    assert sum(each["whole"]["held"] for each in of_three) == numbers  # until then each has its rows only
    for found in (each["whole"] for each in of_three):
        for name, tensor in found["kept"].items():
            assert torch.equal(found["state"][f"model/{name}"], tensor), name
            assert torch.equal(of_three[0]["whole"]["kept"][name], tensor), name


def test_a_worker_without_samples_adds_nothing(of_three: list[dict[str, Any]]) -> None:
    states = [each["without samples"]["state"] for each in of_three]
    assert [each["without samples"]["drawn"] for each in of_three] == [True, False, False]
    assert all(each["without samples"]["training"] for each in of_three)
    for name in ("running_mean", "running_var"):
        model = setup(normed_rows, MOMENTUM, SoloTransport()).model
        model(batches((1,))[0].inputs)
        for state in states:
            assert torch.allclose(state[f"model/1.{name}"], model[1].get_buffer(name), atol=1e-15)
    assert [int(state["model/1.num_batches_tracked"]) for state in states] == [1, 0, 0]  # each one's own


def test_a_saved_state_goes_on_bit_for_bit(of_two: list[dict[str, Any]]) -> None:
    for found in of_two:
        for name, tensor in found["end"].items():
            assert torch.equal(found["resumed"][name], tensor), name
            assert torch.equal(of_two[0]["end"][name], tensor), name
    assert any(name.startswith("optimizer/") for name in of_two[0]["end"])


def test_any_strategy_goes_on_from_its_state_and_it_from_theirs(of_two: list[dict[str, Any]]) -> None:
    worker = Single(setup(plain, MOMENTUM, SoloTransport()))
    worker.load_state(of_two[0]["half"])
    for batch in batches(SIZES)[2:]:
        worker.step([batch], batch.size, 0.1)
    close(worker.state(), of_two[0]["end"])
    expected, _, _ = alone(plain, RECIPES["adamw"], batches(SIZES), 1, FROM_SINGLE)
    for found in of_two:
        close(found["from single"][0], expected)


def test_workers_start_from_rank_0s_values_and_hear_every_vote(of_two: list[dict[str, Any]]) -> None:
    model = setup(plain, MOMENTUM, SoloTransport()).model
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    for found in of_two:
        assert found["votes"] == Votes(stop=True)
        for name, tensor in model.state_dict().items():
            assert torch.equal(found["start"][f"model/{name}"], tensor), name


def test_what_a_worker_holds_is_recorded(of_two: list[dict[str, Any]]) -> None:
    whole = sum(parameter.numel() * 8 for parameter in plain().parameters())
    choices = [found["choices"] for found in of_two]
    assert {each["whole"] for each in choices} == {whole}
    assert {each["groups"] for each in choices} == {2}  # two linear layers
    assert sum(each["parameters"] for each in choices) == sum(each["gradients"] for each in choices) == whole
    assert max(each["parameters"] for each in choices) < 0.6 * whole  # 37 rows are 19 and 18


def test_its_messages_are_counted(of_two: list[dict[str, Any]]) -> None:
    for found in of_two:
        assert found["traffic"]["reduce_scatter"] == 2 * 2  # layers and steps
        assert found["traffic"]["all_gather"] > 0


def test_only_rank_0_makes_whole_tensors_for_a_state(of_two: list[dict[str, Any]]) -> None:
    (tensors, whole), (none, largest) = (found["made"] for found in of_two)
    assert (tensors, whole) == (8, 300 * FEATURES * 8)
    assert none == 0
    assert largest <= 150 * FEATURES * 8, "a message of one's own rows, in bytes, and no more"


def test_sparse_gradients_are_refused(of_two: list[dict[str, Any]]) -> None:
    for found in of_two:
        assert found["refused"].startswith("strategy sharded exchanges dense gradients, but rows.weight")


def test_batch_norm_is_by_worker_and_its_statistics_the_mean(of_two: list[dict[str, Any]]) -> None:
    expected, losses, _ = alone(normed, MOMENTUM, batches((9, 12, 10)), accumulate=2)
    for found in of_two:
        close(found["normed"][0], expected, skip=STATISTICS)
        assert found["normed"][1] == pytest.approx(losses, abs=1e-12)
    [data] = batches((7,))
    for name in ("running_mean", "running_var"):
        mean = torch.zeros(8, dtype=torch.float64)
        for rank in range(2):
            [part] = share(data, rank, 2, 1)
            model = setup(normed, MOMENTUM, SoloTransport()).model
            model(part.inputs)
            mean += model[1].get_buffer(name) * part.size / 7
        for found in of_two:
            assert torch.allclose(found["one step"][f"model/1.{name}"], mean, atol=1e-14)
