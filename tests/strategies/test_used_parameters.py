"""A model that is said to use all its parameters always does; one that may not is never said to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.recipes.members import constant
from manyhands.strategies.base import Compute, SynchronousSetup
from manyhands.strategies.data_parallel import ddp
from manyhands.strategies.data_parallel.ddp import Ddp
from manyhands.strategies.data_parallel.used_parameters import all_used
from manyhands.tasks.models.cnn import cnn
from manyhands.tasks.models.mlp import mlp
from manyhands.tasks.models.resnet import bottleneck, small_resnet
from manyhands.transports.solo import SoloTransport
from parity.alike import FEATURES, Sometimes, batches, plain, tied_and_frozen


class Promising(nn.Module):
    """A user's own module that declares so, which is not checked."""

    uses_all_members = True

    def __init__(self) -> None:
        super().__init__()
        self.member = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.5 else self.member(x)


def stray() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3))
    model.register_parameter("stray", nn.Parameter(torch.zeros(1)))
    return model


def inner_stray() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.extra = nn.Linear(3, 3)
    return nn.Sequential(layer)


def hooked() -> nn.Module:
    model = plain()
    model[0].register_forward_hook(lambda module, inputs, outputs: outputs.detach())
    return model


def overridden() -> nn.Module:
    model = plain()
    model[0].forward = lambda x: torch.zeros(len(x), 37)  # type: ignore[method-assign]
    return model


def parametrized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (plain, (2, FEATURES)),
        (tied_and_frozen, (2, FEATURES)),
        (lambda: mlp([5, 4, 3]), (2, 5)),
        (lambda: cnn(width=0.1, dropout=0.5), (2, 1, 28, 28)),
        (lambda: small_resnet(depth=8), (2, 3, 8, 8)),
        (lambda: nn.Sequential(bottleneck(4, 2, 2), nn.Dropout(1.0)), (2, 4, 8, 8)),
    ],
)
def test_what_is_always_used_gets_gradients(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model = build()
    assert all_used(model)
    model(torch.randn(shape)).sum().backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize(
    "build",
    [
        Sometimes,
        Promising,
        stray,
        inner_stray,
        hooked,
        overridden,
        parametrized,
        lambda: nn.Sequential(plain(), Promising()),
        lambda: nn.MultiheadAttention(4, 2),
    ],
)
def test_of_others_nothing_is_said(build: Callable[[], nn.Module]) -> None:
    assert not all_used(build())


class Group(SoloTransport):  # type: ignore[misc]
    """One worker that has a group all the same."""

    process_group = object()


class Two(SoloTransport):  # type: ignore[misc]
    """Two workers without torch's group, as on MPI."""

    size = 2


class FakeDdp(nn.Module):
    """Keeps the arguments of DDP."""

    arguments: dict[str, object]

    def __init__(self, module: nn.Module, **arguments: object) -> None:
        super().__init__()
        self.module = module
        FakeDdp.arguments = arguments

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def worker(model: nn.Module, loss: Callable[..., Tensor], transport: SoloTransport) -> Ddp:
    setup = SynchronousSetup(
        model=model.double(), recipe=constant(lr=0.1), compute=Compute(loss), transport=transport
    )
    return Ddp(setup)


@pytest.mark.parametrize(("build", "searches"), [(plain, False), (Sometimes, True)])
def test_ddp_searches_only_where_a_parameter_may_be_unused(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[], nn.Module], searches: bool
) -> None:
    """It walked through the graph of every step of every model."""
    monkeypatch.setattr(ddp, "DistributedDataParallel", FakeDdp)
    made = worker(build(), nn.functional.cross_entropy, Group())
    (batch,) = batches((6,))
    assert made.step(iter([batch]), 6, 0.1).loss > 0
    assert FakeDdp.arguments["find_unused_parameters"] is searches


def test_a_gradient_that_is_missing_against_all_reason_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuing would mean an update with gradients that were never summed."""
    monkeypatch.setattr(ddp, "DistributedDataParallel", FakeDdp)
    apart = torch.zeros((), dtype=torch.float64, requires_grad=True)
    made = worker(plain(), lambda outputs, targets: apart * 2, Group())
    (batch,) = batches((6,))
    with pytest.raises(ManyhandsError, match=r"parameter 0\.bias got no gradient"):
        made.step(iter([batch]), 6, 0.1)


def test_several_workers_on_gpus_need_torchs_group() -> None:
    """Over MPI each went its own way, silently: who had no group was taken for one worker."""
    with pytest.raises(UsageError, match=r"2 workers whose models are on CUDA .* use --transport torch"):
        worker(plain(), nn.functional.cross_entropy, Two())
