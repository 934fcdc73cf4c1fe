"""What only torch.distributed has: a rendezvous, and a process group that others can use."""

from __future__ import annotations

import os
import socket
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manyhands.core.errors import DeadlineError, UsageError
from manyhands.core.rank_info import RankInfo
from manyhands.transports import torch_
from manyhands.transports.base import Transport
from manyhands.transports.torch_ import TorchTransport
from transports.groups import processes

run_group = partial(processes, partial(TorchTransport, timeout=20.0))


def trains_with_ddp(transport: TorchTransport) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    parallel = DistributedDataParallel(model, process_group=transport.process_group)
    parallel(torch.full((1, 2), transport.rank + 1.0)).sum().backward()
    assert model.weight.grad is not None
    return list(model.weight.grad.flatten().tolist())


def test_ddp_can_use_its_process_group() -> None:
    assert run_group(["here"] * 2, trains_with_ddp) == [[1.5, 1.5]] * 2


def left_behind(transport: Transport) -> tuple[str | None, str]:
    with pytest.raises(UsageError) as caught:
        TorchTransport(RankInfo())
    return os.environ.get("GLOO_SOCKET_IFNAME"), str(caught.value)


def test_the_environment_is_restored_and_a_second_transport_is_refused() -> None:
    text = "transport torch: torch.distributed is already in use in this process"
    assert run_group(["here"] * 2, left_behind) == [(None, text)] * 2


class SilentPeerChannel:
    """Rank 0's channel to a peer that receives the address and never connects."""

    stop = None

    def exchange(self, value: object) -> list[object]:
        return [value, None]


def test_connecting_has_a_timeout() -> None:
    info = RankInfo(0, ("here", "here"), SilentPeerChannel())  # type: ignore[arg-type]
    with pytest.raises(DeadlineError, match=r"^waited 0\.5 s in connect 1 for the other workers$"):
        TorchTransport(info, timeout=0.5)


def test_one_host_needs_no_name_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert torch_._address(RankInfo(0, ("a", "a"))) == "127.0.0.1"
    assert torch_._interface("127.0.0.1") == "lo"
    with torch_._interface_towards("127.0.0.1"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_other_hosts_get_an_address_they_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    info = RankInfo(0, ("a", "no-such-host.invalid"))
    monkeypatch.setattr(torch_, "_source", lambda address: {"no-such-host.invalid": "10.0.0.7"}[address])
    assert torch_._address(info) == "10.0.0.7"

    def unknown(address: str) -> str:
        raise OSError(address)

    monkeypatch.setattr(torch_, "_source", unknown)
    assert torch_._address(info) == socket.gethostname()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.9")
    assert torch_._address(info) == "10.0.0.9"
