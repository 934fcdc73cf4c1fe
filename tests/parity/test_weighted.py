"""A loss over weights equals one worker, however unevenly the weight is divided: in any way of summing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

import manyhands as mh
from manyhands.data.base import Batch
from manyhands.recipes.members import constant
from manyhands.strategies.base import Compute, SynchronousSetup
from manyhands.strategies.data_parallel.allreduce import AllReduce
from manyhands.strategies.data_parallel.ddp import Ddp
from manyhands.strategies.local_sgd.average import Average
from manyhands.strategies.options import AverageOptions
from manyhands.strategies.single import Single
from manyhands.transports.base import Transport
from manyhands.transports.solo import SoloTransport
from manyhands.transports.threads import ThreadGroup
from manyhands.transports.torch_ import TorchTransport
from parity.alike import batches, make, plain, share
from transports.groups import processes

WEIGHTS = torch.tensor([1.0, 7.0, 0.0], dtype=torch.float64)  # a class that does not count at all
SIZES = (9, 10, 2, 7)
CLIPPED = constant(lr=0.1, momentum=0.9, weight_decay=0.01, clip=0.05)
PLAIN = constant(lr=0.1, momentum=0.9)


def weighted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy(outputs, targets, WEIGHTS, reduction="sum"), WEIGHTS[targets].sum()


MODEL = make(plain)  # once: threads share torch's generator


def setup(transport: Transport, recipe: Any, **more: Any) -> SynchronousSetup:
    return SynchronousSetup(
        model=copy.deepcopy(MODEL), recipe=recipe, compute=Compute(weighted), transport=transport, **more
    )


def train(worker: Any, rank: int, size: int, accumulate: int = 1) -> tuple[dict[str, Tensor], list[float]]:
    losses = [
        worker.step(iter(share(batch, rank, size, accumulate)), batch.size, 0.1).loss
        for batch in given_batches()
    ]
    return {name: tensor.detach().clone() for name, tensor in worker.state().items()}, losses


def given_batches() -> list[Batch]:
    found = batches(SIZES)
    found[1].targets[:6] = 2  # of some workers nothing counts
    found[2].targets[:] = 2  # a batch of which nothing counts
    return found


def allreduce(transport: Transport, accumulate: int = 2) -> tuple[dict[str, Tensor], list[float]]:
    return train(AllReduce(setup(transport, CLIPPED)), transport.rank, transport.size, accumulate)


def ddp(transport: Transport) -> tuple[dict[str, Tensor], list[float]]:
    return train(Ddp(setup(transport, CLIPPED)), transport.rank, transport.size)


def average(transport: Transport) -> tuple[dict[str, Tensor], list[float]]:
    options = AverageOptions(every=1)
    return train(Average(setup(transport, PLAIN, options=options)), transport.rank, transport.size)


WAYS: dict[str, tuple[Callable[[], list[Any]], Any]] = {
    "threads that share memory": (lambda: ThreadGroup(3).run(allreduce), CLIPPED),
    "threads on two hosts": (lambda: ThreadGroup(3, hosts="aab").run(allreduce), CLIPPED),
    "local SGD": (lambda: ThreadGroup(3).run(average), PLAIN),
    "DDP": (lambda: processes(TorchTransport, ("here",) * 3, ddp), CLIPPED),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_equals_one_worker(way: str) -> None:
    run, recipe = WAYS[way]
    expected, losses = train(Single(setup(SoloTransport(), recipe)), 0, 1)
    (state, found), *_ = run()
    assert losses[2] == 0.0
    assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) < 1e-12
    for name, tensor in expected.items():
        assert (state[name] - tensor).abs().max() < 1e-12, name


def test_one_worker_takes_the_mean_over_weights() -> None:
    """By torch's own weighted mean, which is over all classes of the batch."""
    batch = batches((9,))[0]
    worker = Single(setup(SoloTransport(), constant(lr=0.1)))
    model = copy.deepcopy(MODEL)
    loss = cross_entropy(model(batch.inputs), batch.targets, WEIGHTS)
    loss.backward()  # type: ignore[no-untyped-call]
    found = worker.step([batch], batch.size, 0.1).loss
    assert found == pytest.approx(loss.item(), abs=1e-14)
    for parameter, own in zip(model.parameters(), worker.model.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(own, parameter - 0.1 * parameter.grad, rtol=0, atol=1e-14)


@given(size=st.integers(2, 12), workers=st.integers(1, 4), accumulate=st.integers(1, 3))
def test_any_division_gives_the_same(size: int, workers: int, accumulate: int) -> None:
    batch = batches((size,))[0]
    whole = Single(setup(SoloTransport(), PLAIN))
    expected = whole.step([batch], size, 0.1).loss

    def work(transport: Transport) -> tuple[float, dict[str, Tensor]]:
        worker = AllReduce(setup(transport, PLAIN))
        parts = share(batch, transport.rank, workers, accumulate)
        return worker.step(iter(parts), size, 0.1).loss, {n: t.clone() for n, t in worker.state().items()}

    for loss, state in ThreadGroup(workers).run(work)[:1]:
        assert loss == pytest.approx(expected, abs=1e-13)
        for name, tensor in whole.state().items():
            assert (state[name] - tensor).abs().max() < 1e-13, name


def test_local_sgd_is_resumed_between_two_averages(tmp_path: Path) -> None:
    """Workers have different weights by then, which a checkpoint keeps."""
    rows = Path(__file__).parents[1] / "bring" / "rows.py"
    settings: dict[str, Any] = {
        "strategy": "average", "workers": 2, "every": 40, "batch": 8, "recipe": "constant", "lr": 0.1,
        "epochs": 9, "evaluate_every": 9, "quiet": True,
    }  # fmt: skip
    task = f"{rows}:padded_language_model"
    whole = mh.train(task, out=tmp_path / "whole", **settings)
    mh.train(task, out=tmp_path / "part", checkpoint_every=0, keep=20, **settings)
    for file in (tmp_path / "part" / "checkpoints").glob("*"):  # back to step 32, eight before an average
        if not file.name.startswith("step-000000032"):
            file.unlink()
    (tmp_path / "part" / "result.json").unlink()
    again = mh.train(task, out=tmp_path / "part", resume=True, **settings)
    assert (again.steps, again.resumed, again.loss) == (whole.steps, 1, whole.loss)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "part"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
