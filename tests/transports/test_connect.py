"""Building a transport from its name, and what is refused."""

from __future__ import annotations

import pickle
import re
import sys
import threading
from functools import partial
from typing import Any

import pytest
import torch

from manyhands.core.errors import PeerLostError, UsageError
from manyhands.core.rank_info import NullChannel, RankInfo
from manyhands.transports import TRANSPORTS, rank_grid
from manyhands.transports.base import Transport
from manyhands.transports.connect import check, connect
from manyhands.transports.mpi import MpiTransport
from manyhands.transports.threads import ThreadGroup, ThreadsTransport
from transports.groups import between_hosts, processes


def refused(sentence: str) -> Any:
    return pytest.raises(UsageError, match=f"^{re.escape(sentence)}$")


def test_a_transport_that_cannot_connect_the_workers_is_refused() -> None:
    two = RankInfo(0, ("a", "b"))
    with refused(
        "transport shm connects workers on one host, but there are 2 hosts (a, b): use torch or mpi"
    ):
        connect("shm", two)
    with refused("transport solo is for one worker, but there are 2: use shm, torch or mpi"):
        connect("solo", two)
    with refused("unknown transport 'smh' (did you mean 'shm'? known: solo, threads, shm, torch, mpi)"):
        connect("smh", two)
    for name in TRANSPORTS:
        check(name, ["a"])


@pytest.mark.parametrize("name", ["solo", "threads", "shm", "torch"])
def test_one_worker_can_use_any_transport(name: str) -> None:
    transport = connect(name, RankInfo())
    try:
        assert (transport.rank, transport.size, transport.peers_on_host) == (0, 1, (0,))
        assert transport.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    finally:
        transport.close()


def kinds(transport: Transport) -> tuple[str, str, str, tuple[int, ...]]:
    parts = (transport, transport.on_host, transport.across)
    first, second, third = (f"{type(part).__name__} {part.rank}/{part.size}" for part in parts)
    return first, second, third, transport.peers_on_host


def test_several_hosts_share_memory_in_rows_and_send_messages_in_columns() -> None:
    found = processes(partial(between_hosts, name="torch"), "abab", kinds)
    assert found == [
        ("HostsTransport 0/4", "ShmTransport 0/2", "TorchTransport 0/2", (0, 2)),
        ("HostsTransport 1/4", "ShmTransport 0/2", "TorchTransport 1/2", (1, 3)),
        ("HostsTransport 2/4", "ShmTransport 1/2", "TorchTransport 0/2", (0, 2)),
        ("HostsTransport 3/4", "ShmTransport 1/2", "TorchTransport 1/2", (1, 3)),
    ]


@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_hosts_with_one_worker_or_unequal_numbers_use_messages_only(hosts: str) -> None:
    for rank, found in enumerate(processes(partial(between_hosts, name="torch"), hosts, kinds)):
        assert found == (
            f"TorchTransport {rank}/{len(hosts)}",
            "SoloTransport 0/1",
            f"TorchTransport {rank}/{len(hosts)}",
            (rank,),
        )


def test_a_grid_of_ranks() -> None:
    assert rank_grid.rows("aabb") == [(0, 1), (2, 3)]
    assert rank_grid.columns("aabb") == [(0, 2), (1, 3)]
    assert rank_grid.rows("abab") == [(0, 2), (1, 3)]
    assert rank_grid.columns("aab") == [(0, 1, 2)]
    assert rank_grid.group_of(2, rank_grid.columns("aabb")) == (0, 2)


class ThreadChannel(NullChannel):
    """A control channel between threads."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self._rank, self._values, self._barrier = rank, values, barrier

    def exchange(self, value: Any) -> list[Any]:
        self._values[self._rank] = value
        self._barrier.wait()
        return list(self._values)


def test_threads_find_their_group_by_their_channels() -> None:
    values, barrier, sums = [None, None], threading.Barrier(2), {}

    def work(rank: int) -> None:
        transport = ThreadsTransport(RankInfo(rank, ("here", "here"), ThreadChannel(rank, values, barrier)))
        sums[rank] = transport.all_reduce(torch.full((1,), rank + 1.0)).item()
        transport.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {0: 3.0, 1: 3.0}


def test_threads_do_not_connect_processes() -> None:
    with refused("transport threads connects threads of one process, not processes: use shm, torch or mpi"):
        pickle.dumps(ThreadGroup(2))


def test_the_first_cause_is_raised() -> None:
    """Rank 0 fails because rank 1 is gone; rank 1 says why."""

    def work(transport: Transport) -> None:
        if transport.rank == 1:
            raise ValueError("this is why")
        transport.barrier()

    with pytest.raises(ValueError, match=r"^this is why$"):
        ThreadGroup(3).run(work)

    def leaves(transport: Transport) -> None:
        if transport.rank != 1:
            transport.barrier()

    with pytest.raises(PeerLostError, match=r"^worker 1 is gone \(noticed in barrier 1\)$"):
        ThreadGroup(3).run(leaves)


def test_mpi_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with refused("transport mpi needs mpi4py and an MPI library: pip install 'manyhands[mpi]'"):
        MpiTransport(RankInfo())
