"""The DDP variant (for CUDA), here on gloo: uneven shares, unused parameters, workers without samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.recipes.members import constant
from manyhands.strategies.base import Compute, SynchronousSetup, Votes
from manyhands.strategies.data_parallel.ddp import Ddp
from manyhands.strategies.single import Single
from manyhands.transports.base import Transport
from manyhands.transports.solo import SoloTransport
from manyhands.transports.torch_ import TorchTransport
from parity.alike import Sometimes, batches, make, normed, plain, share
from transports.groups import processes

RECIPE = constant(lr=0.1, momentum=0.9, weight_decay=0.01, clip=0.5)
SIZES = (9, 10, 2, 7)  # two samples for three workers: the ragged end of an epoch
MODELS = {"sometimes": Sometimes, "plain": plain, "normed": normed}  # unused parameters are sought in one


def train(
    worker: Ddp | Single, rank: int, size: int, accumulate: int
) -> tuple[dict[str, Tensor], list[float], Votes]:
    losses, votes = [], Votes()
    for batch in batches(SIZES if accumulate > 1 or size == 1 else (9, 10)):
        mine = share(batch, rank, size, accumulate)
        outcome = worker.step(iter(mine), batch.size, 0.1, lambda: Votes(save=rank == size - 1))
        losses.append(outcome.loss)
        votes = outcome.votes
    return {name: tensor.detach().clone() for name, tensor in worker.state().items()}, losses, votes


def ddp(transport: Transport, model: str, accumulate: int) -> tuple[dict[str, Tensor], list[float], Votes]:
    setup = SynchronousSetup(
        model=make(MODELS[model]),
        recipe=RECIPE,
        compute=Compute(nn.functional.cross_entropy),
        transport=transport,
    )
    return train(Ddp(setup), transport.rank, transport.size, accumulate)


def of_sometimes(transport: Transport) -> tuple[dict[str, Tensor], list[float], Votes]:
    return ddp(transport, "sometimes", 2)


def of_plain(transport: Transport) -> tuple[dict[str, Tensor], list[float], Votes]:
    return ddp(transport, "plain", 2)


def of_normed(transport: Transport) -> tuple[dict[str, Tensor], list[float], Votes]:
    return ddp(transport, "normed", 1)


@pytest.mark.parametrize(("build", "trained"), [(Sometimes, of_sometimes), (plain, of_plain)])
def test_ddp_equals_one_worker(build: Callable[[], nn.Module], trained: Callable[..., Any]) -> None:
    setup = SynchronousSetup(
        model=make(build),
        recipe=RECIPE,
        compute=Compute(nn.functional.cross_entropy),
        transport=SoloTransport(),
    )
    expected, losses, _ = train(Single(setup), 0, 1, 1)
    for state, found, votes in processes(TorchTransport, ("here",) * 3, trained):
        assert votes == Votes(save=True)
        assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) < 1e-12
        for name, tensor in expected.items():
            if tensor.numel():
                assert (state[name] - tensor).abs().max() < 1e-11, name


def test_its_buffers_are_equal_everywhere() -> None:
    results = processes(TorchTransport, ("here",) * 2, of_normed)
    for name, tensor in results[0][0].items():
        assert torch.equal(results[1][0][name], tensor), name
