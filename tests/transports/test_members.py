"""Every transport passes the conformance suite: one class each."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.core.rank_info import RankInfo
from manyhands.testing.transports import Rank, TransportSuite
from manyhands.transports.base import Transport
from manyhands.transports.mpi import MpiTransport
from manyhands.transports.shm import segment
from manyhands.transports.shm.transport import ShmTransport
from manyhands.transports.solo import SoloTransport
from manyhands.transports.threads import ThreadGroup
from manyhands.transports.torch_ import TorchTransport
from transports.groups import MpiGroup, between_hosts, mpirun, processes


class TestSolo(TransportSuite):
    sizes = (1,)

    def run_group(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        return [function(SoloTransport())]

    def test_there_is_no_other_rank(self) -> None:
        alone = r"^the solo transport has one rank: "
        with pytest.raises(UsageError, match=alone + r"there is no rank 1$"):
            SoloTransport().send(torch.zeros(1), 1)
        with pytest.raises(UsageError, match=alone + r"there is no rank 1$"):
            SoloTransport().recv(torch.zeros(1), 1)
        with pytest.raises(UsageError, match=alone + r"it would wait forever for a message$"):
            SoloTransport().recv_any(torch.zeros(1))
        with pytest.raises(UsageError, match=alone + r"there is no rank 1$"):
            SoloTransport().broadcast(torch.zeros(1), 1)
        with pytest.raises(UsageError, match=r"^the solo transport has one rank, but there are 2 workers$"):
            SoloTransport(RankInfo(0, ("a", "a")))

    def test_messages_to_itself_arrive_in_order(self) -> None:
        transport, first = SoloTransport(), torch.ones(2)
        transport.send(first, 0)
        first.fill_(-1)
        transport.send(torch.full((2,), 2.0), 0)
        assert transport.recv(torch.zeros(2), 0).tolist() == [1.0, 1.0]
        last = torch.zeros(2)
        assert transport.recv_any(last) == 0
        assert last.tolist() == [2.0, 2.0]


class TestThreads(TransportSuite):
    short = 0.2
    dies = staticmethod(lambda: None)  # a thread that returns counts as dead

    def run_group(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        return ThreadGroup(size, timeout).run(function)


class TestThreadsOnSeveralHosts(TransportSuite):
    """Ranks 0 and 2 on one host, 1 and 3 on another; or hosts of two and one, where each rank is a host."""

    sizes = (3, 4)
    short = 0.2
    dies = staticmethod(lambda: None)

    def run_group(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        return ThreadGroup(size, timeout, hosts="abab"[:size]).run(function)


def fails_in_one_group(transport: Transport) -> tuple[str, list[float]]:
    if transport.rank == 2:
        segment.reserve = out_of_memory
    with pytest.raises(ManyhandsError) as caught:
        transport.messages.split([(0, 1), (2,)])
    return str(caught.value), transport.all_reduce(torch.ones(1)).tolist()


def out_of_memory(fd: int, start: int, nbytes: int) -> None:
    raise ManyhandsError("no memory left")


class TestShm(TransportSuite):
    short = 0.3

    def run_group(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        return processes(partial(ShmTransport, timeout=timeout), ["here"] * size, function)

    def test_a_group_that_cannot_be_made_fails_for_all(self) -> None:
        """Also in the other groups; and the transport works as before."""
        assert self.run_group(3, fails_in_one_group) == [("no memory left", [3.0])] * 3


class TestTorch(TransportSuite):
    late = (
        TransportSuite.late + "|waited .* in {operation} .* for the other workers"
    )  # gloo does not say for which rank
    lost = TransportSuite.lost + "|a worker is gone .*{operation} .*"

    def run_group(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        return processes(partial(TorchTransport, timeout=timeout), ["here"] * size, function)


class TestTorchBetweenHosts(TransportSuite):
    """Two hosts with two ranks each, which share memory."""

    sizes = (4,)
    late = r"waited 0\.\d s in \w+ \d+ for (worker \d|the other workers)"  # in one of its parts
    lost = r"(worker \d|a worker) is gone \(noticed in \w+ \d+\)"

    def run_group(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        return processes(partial(between_hosts, name="torch", timeout=timeout), "aabb", function)


NO_MPI = find_spec("mpi4py") is None or shutil.which("mpirun", path=str(Path(sys.executable).parent)) is None
GROUPS: dict[int, MpiGroup] = {}  # each is started once, because that takes seconds


def started(size: int) -> MpiGroup:
    if size not in GROUPS:
        GROUPS[size] = MpiGroup(size)
    return GROUPS[size]


@pytest.fixture(autouse=True, scope="module")
def _end_groups() -> Iterator[None]:
    yield
    while GROUPS:
        GROUPS.popitem()[1].close()


@pytest.mark.skipif(NO_MPI, reason="mpi4py or mpirun is not installed")
class TestMpi(TransportSuite):
    sizes = (3,)
    late = TestTorch.late
    short = 0.3
    dies = None  # mpirun ends the whole job

    def run_group(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        return started(size).run(partial(MpiTransport, timeout=timeout), ["here"] * size, function)

    def test_ranks_are_those_of_the_run(self) -> None:
        """Whatever numbers mpirun gave them."""
        assert started(3).run(backwards, ["here"] * 3, numbered) == [2, 1, 0]

    def test_another_number_of_processes_is_refused(self) -> None:
        expected = (
            "transport mpi: mpirun started 3 processes, but the run has 4: "
            "start it with --launcher mpi, or with mpirun -n 4 manyhands train ..."
        )
        assert self.run_group(3, joins_a_larger_group) == [expected] * 3

    def test_a_dead_rank_ends_the_job(self, tmp_path: Path) -> None:
        """MPI itself does not report a dead peer. mpirun ends the others."""
        since = time.monotonic()
        job = mpirun(2, "from transports.groups import dies_in_mpi; dies_in_mpi()", "", str(tmp_path))
        output, _ = job.communicate(timeout=60)
        assert job.returncode == 3, output
        assert "Exit code:    3" in output
        assert time.monotonic() - since < 30


def backwards(info: RankInfo) -> MpiTransport:
    return MpiTransport(RankInfo(info.size - 1 - info.rank, info.hosts, info.channel))


def numbered(transport: Transport) -> int:
    assert torch.cat(transport.all_gather(torch.tensor([transport.rank]))).tolist() == [0, 1, 2]
    return transport.rank


def joins_a_larger_group(transport: Transport) -> str:
    with pytest.raises(UsageError) as caught:
        MpiTransport(RankInfo(transport.rank, ("here",) * 4))
    return str(caught.value)


@pytest.mark.skipif(NO_MPI, reason="mpi4py or mpirun is not installed")
class TestMpiBetweenHosts(TransportSuite):
    sizes = (4,)
    short = 0.3
    late = TestTorchBetweenHosts.late
    dies = None

    def run_group(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        return started(size).run(partial(between_hosts, name="mpi", timeout=timeout), "abab", function)
