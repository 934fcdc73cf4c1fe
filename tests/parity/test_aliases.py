"""Models that reach a parameter by a second reference: trained as by one worker, or refused by name.

`sharded` trained none of them: what the model computed with got no update, and the run said "finished".
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

from manyhands.core.errors import UsageError
from manyhands.strategies.aliases import refuse_views
from manyhands.strategies.asynchronous.hogwild import Hogwild
from manyhands.strategies.asynchronous.parameter_server import server
from manyhands.strategies.local_sgd.average import Average
from manyhands.strategies.options import AverageOptions
from manyhands.strategies.sharded.worker import Sharded
from manyhands.transports.base import Transport
from manyhands.transports.threads import ThreadGroup
from manyhands.transports.torch_ import TorchTransport
from parity import test_allreduce, test_asynchronous, test_pipeline
from parity.alike import CLASSES, FEATURES, batches, close
from parity.test_allreduce import MOMENTUM
from transports.groups import processes

SIZES = (9, 10, 7)
WIDE, LABELS = test_pipeline.FEATURES, test_pipeline.CLASSES


class Listed(nn.Module):
    """Computes with weights that it also keeps in a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)
        self.weights = [self.first.weight, self.first.bias, self.last.weight, self.last.bias]

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.weights
        return F.linear(F.linear(x, a, b).tanh(), c, d)


class Enclosed(nn.Module):
    """Reaches one weight through a closure, which cannot be inspected, and the rest as usual."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)
        weight = self.last.weight
        self.penalty = lambda x: x @ weight.t()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        out: Tensor = self.last(hidden) + self.penalty(hidden)
        return out


class Recurrent(nn.Module):
    """Torch's own keep their weights in a list too, and keep it up to date."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.cell(x.view(-1, 2, 3))[0][:, -1])
        return out


class Frozen(Listed):
    """What is not trained may be reached from anywhere."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.first.parameters():
            parameter.requires_grad_(False)
        self.weights = self.weights[:2]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(F.linear(x, *self.weights).tanh())
        return out


class Block(nn.Module):
    """A layer that also uses another one's weight, which is none of its own."""

    def __init__(self, other: list[nn.Parameter]) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDE, WIDE), other

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out if not self.other else out + x @ self.other[0]


def staged(reach: bool) -> nn.Module:
    first = nn.Linear(WIDE, WIDE)
    return nn.Sequential(first, nn.Tanh(), Block([first.weight] if reach else []), nn.Linear(WIDE, LABELS))


def own_lists() -> nn.Module:
    """Each block keeps its own weights in a list."""

    class Own(nn.Module):
        def __init__(self, out: int) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDE, out)
            self.kept = [self.linear.weight, self.linear.bias]

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, *self.kept)

    return nn.Sequential(Own(WIDE), nn.Tanh(), Own(LABELS))


@pytest.mark.parametrize("model", [Listed, Enclosed])
def test_allreduce_trains_it_as_one_worker_does(model: Any) -> None:
    data = batches(SIZES)
    expected, losses, _ = test_allreduce.alone(model, MOMENTUM, data)
    for state, found, _ in test_allreduce.together(("a", "a"), model, MOMENTUM, data):
        close(state, expected)
        assert found == pytest.approx(losses, abs=1e-12)


@pytest.mark.parametrize("model", [Listed, Enclosed])
def test_average_trains_it_as_one_worker_does(model: Any) -> None:
    data = batches(SIZES)
    expected, losses, _ = test_allreduce.alone(model, MOMENTUM, data)
    group = ThreadGroup(1, timeout=20)
    made = test_allreduce.setup(model, MOMENTUM, group.transport(0))
    made = dataclasses.replace(made, options=AverageOptions(every=1))
    state, found, _ = test_allreduce.drive(Average(made), made.transport, data, 1)
    close(state, expected)
    assert found == pytest.approx(losses, abs=1e-12)


@pytest.mark.parametrize(("strategy", "name"), [(Hogwild, "hogwild"), (server, "server")])
@pytest.mark.parametrize("model", [Listed, Enclosed])
def test_the_asynchronous_ones_do(strategy: Any, name: str, model: Any) -> None:
    recipe = test_asynchronous.RECIPES["momentum"]
    test_asynchronous.same(
        test_asynchronous.run(strategy, recipe, name, 1, model),
        *test_asynchronous.reference(recipe, 8, model),
    )


@pytest.mark.parametrize("hosts", ["", "ab"])
def test_a_pipeline_trains_stages_that_keep_to_themselves(hosts: str) -> None:
    plan = test_pipeline.Plan(2, 1, 2, hosts=hosts, cut=(1,))
    test_pipeline.check(plan, own_lists, MOMENTUM, test_pipeline.batches(SIZES))
    test_pipeline.check(plan, lambda: staged(False), MOMENTUM, test_pipeline.batches(SIZES))


def test_a_pipeline_refuses_a_stage_that_reaches_into_another() -> None:
    """Its gradient of the other stage's weight was dropped."""
    plan = test_pipeline.Plan(2, 1, 2, hosts="ab", cut=(1,))  # messages end when one of the two does
    with pytest.raises(
        UsageError,
        match=r"^this model cannot be trained in stages: it reaches the parameter 0.weight by another",
    ):
        test_pipeline.together(plan, lambda: staged(True), MOMENTUM, test_pipeline.batches(SIZES))


def keeping(kept: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].kept = kept(model[0].weight)
    return model


@pytest.mark.parametrize(
    "kept",
    [
        lambda weight: weight.data,
        lambda weight: weight.t(),
        lambda weight: [weight.detach()[1:]],
        lambda weight: {"a": (1, weight.view(-1))},
    ],
)
def test_what_lies_in_a_parameters_memory_is_refused(kept: Any) -> None:
    """Parameters move to shared memory, and it kept the values of the beginning, in silence."""
    with pytest.raises(UsageError, match=r"^0\.kept lies in the memory of the parameter 0\.weight \("):
        refuse_views(keeping(kept))


def test_a_buffer_in_a_parameters_memory_is_refused_and_two_parameters_in_one() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model.register_buffer("first", model[0].weight.data)
    with pytest.raises(UsageError, match=r"^first lies in the memory of the parameter 0\.weight"):
        refuse_views(model)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(UsageError, match=r"^the parameters 0\.weight and 1\.weight are two that share one"):
        refuse_views(model)


@pytest.mark.parametrize(
    "model",
    [
        lambda: keeping(lambda weight: weight),
        lambda: keeping(lambda weight: weight.detach().clone()),
        lambda: keeping(lambda weight: torch.zeros(0)),
        lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        lambda: nn.LazyLinear(3),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.Transformer(8, 2, 1, 1, 8),
        Recurrent,
        Listed,
        test_allreduce.Strided,
        test_allreduce.tied_and_frozen,
    ],
)
def test_what_is_its_own_or_the_parameter_itself_is_not(model: Any) -> None:
    refuse_views(model())


SHARDED = {"listed": Listed, "enclosed": Enclosed, "recurrent": Recurrent, "frozen": Frozen}


def sharded(transport: Transport) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("recurrent", "frozen", "listed", "enclosed"):
        worker = Sharded(test_allreduce.setup(SHARDED[name], MOMENTUM, transport))
        try:
            found[name] = test_allreduce.drive(worker, transport, batches(SIZES), 1)[:2]
        except UsageError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def of_two() -> list[dict[str, Any]]:
    return processes(TorchTransport, ("here",) * 2, sharded)


@pytest.mark.parametrize(
    ("name", "parameter"), [("listed", r"(first|last)\.(weight|bias)"), ("enclosed", r"last\.weight")]
)
def test_sharded_refuses_it_by_name(name: str, parameter: str, of_two: list[dict[str, Any]]) -> None:
    for found in of_two:
        with pytest.raises(
            UsageError, match=rf"^this model cannot be trained by strategy sharded: .* {parameter} by another"
        ):
            raise UsageError(found[name])


@pytest.mark.parametrize("name", ["recurrent", "frozen"])
def test_sharded_trains_what_is_kept_up_to_date_or_not_trained(
    name: str, of_two: list[dict[str, Any]]
) -> None:
    expected, losses, _ = test_allreduce.alone(SHARDED[name], MOMENTUM, batches(SIZES))
    for state, found in (each[name] for each in of_two):
        close(state, expected)
        assert found == pytest.approx(losses, abs=1e-12)
