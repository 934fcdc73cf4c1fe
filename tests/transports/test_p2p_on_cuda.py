"""Messages between two ranks go through main memory, also from CUDA: shown with fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from manyhands.core.rank_info import RankInfo
from manyhands.transports import connect as connecting
from manyhands.transports import hosts, torch_
from manyhands.transports.torch_ import TorchTransport

GPU = torch.device("cuda", 1)


class Work:
    def wait(self, *_: object) -> None: ...


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TorchTransport, list[tuple[str, str]]]]:
    """Rank 0 of 2 with tensors on CUDA, and the calls of torch.distributed with the device of each tensor."""
    made = object.__new__(TorchTransport)
    made._backend, made.rank, made.size, made._members = "cpu:gloo,cuda:nccl", 0, 2, (0, 1)
    made.process_group, made._timeout = None, 1.0  # type: ignore[assignment]
    made._begin()
    carried: list[tuple[str, str]] = []

    def carry(name: str, answer: object) -> Callable[..., object]:
        def call(tensor: Tensor, *_: object, **named: Any) -> object:
            carried.append((name, tensor.device.type))
            return answer

        return call

    for name, answer in (("isend", Work()), ("recv", 1), ("all_reduce", None)):
        monkeypatch.setattr(dist, name, carry(name, answer))
    monkeypatch.setattr(
        torch_.tensor_bytes, "copy_back", lambda made, tensor: tensor
    )  # a fake has no address
    with FakeTensorMode():
        yield made, carried


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")  # to know whether a copy was made
def test_ranks_that_send_to_each_other_do_not_wait_in_nccl(on_cuda: tuple[TorchTransport, list[Any]]) -> None:
    """Neighbors in a pipeline both sent and then received. NCCL executes that in order: a deadlock."""
    transport, carried = on_cuda
    transport.send(torch.ones(300_000, device=GPU), 1, ahead=4)
    transport.recv(torch.ones(300_000, device=GPU), 1)
    transport.recv_any(torch.ones(3, device=GPU))
    assert carried == [("isend", "cpu"), ("recv", "cpu"), ("recv", "cpu")]


@pytest.mark.parametrize(("device", "made"), [(GPU, "torch"), (torch.device("cpu"), "hosts")])
def test_gpus_of_several_hosts_are_one_group(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, made: str
) -> None:
    """They were connected per host, so DDP found no group and each worker trained alone."""
    monkeypatch.setattr(connecting.registry, "member", lambda *_: lambda info, **named: "torch")
    monkeypatch.setattr(hosts, "HostsTransport", lambda info, **named: "hosts")
    assert connecting.connect("torch", RankInfo(0, ("a", "a", "b", "b")), device=device) == made


def test_sums_stay_on_the_gpu(on_cuda: tuple[TorchTransport, list[Any]]) -> None:
    transport, carried = on_cuda
    transport.all_reduce(torch.ones(8, device=GPU))
    assert carried == [("all_reduce", "cuda")]
