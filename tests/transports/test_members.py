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

from manyhands.core.errors import UsageError
from manyhands.core.rank_info import RankInfo
from manyhands.testing.transports import Rank, TransportSuite
from manyhands.transports.base import Transport
from manyhands.transports.mpi import MpiTransport
from manyhands.transports.shm.transport import ShmTransport
from manyhands.transports.solo import SoloTransport
from manyhands.transports.threads import ThreadGroup
from manyhands.transports.torch_ import TorchTransport
from transports.gangs import MpiGang, between_hosts, mpirun, processes


class TestSolo(TransportSuite):
    sizes = (1,)

    def gang(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        return [function(SoloTransport())]

    def test_there_is_nobody_else(self) -> None:
        alone = r"^the solo transport has one rank: "
        with pytest.raises(UsageError, match=alone + r"nothing can be sent to rank 1$"):
            SoloTransport().send(torch.zeros(1), 1)
        with pytest.raises(UsageError, match=alone + r"nothing can come from rank 1$"):
            SoloTransport().recv(torch.zeros(1), 1)
        with pytest.raises(UsageError, match=alone + r"nothing can come from another$"):
            SoloTransport().recv_any(torch.zeros(1))
        with pytest.raises(UsageError, match=alone + r"there is no rank 1$"):
            SoloTransport().broadcast(torch.zeros(1), 1)
        with pytest.raises(UsageError, match=r"^the solo transport has one rank, and there are 2 workers$"):
            SoloTransport(RankInfo(0, ("a", "a")))


class TestThreads(TransportSuite):
    short = 0.2
    dies = staticmethod(lambda: None)  # a thread that returns is gone

    def gang(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        return ThreadGroup(size, timeout).run(function)


class TestThreadsOnSeveralHosts(TransportSuite):
    """Two and two, their ranks by turns; two and one, where each rank counts as a host."""

    sizes = (3, 4)
    short = 0.2
    dies = staticmethod(lambda: None)

    def gang(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        return ThreadGroup(size, timeout, hosts="abab"[:size]).run(function)


def refused(transport: Transport) -> str:
    with pytest.raises(UsageError) as caught:
        transport.messages.parts([(0, 1)])
    return str(caught.value)


class TestShm(TransportSuite):
    short = 0.3

    def gang(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        return processes(partial(ShmTransport, timeout=timeout), ["here"] * size, function)

    def test_parts_sum_among_themselves(self) -> None:
        """Those who share memory are not divided."""
        said = "transport shm cannot be divided into groups of workers: use torch or mpi"
        assert self.gang(2, refused) == [said] * 2


class TestTorch(TransportSuite):
    late = (
        TransportSuite.late + "|waited .* in {operation} .* for the other workers"
    )  # gloo does not say for whom
    lost = TransportSuite.lost + "|a worker is gone .*{operation} .*"

    def gang(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        return processes(partial(TorchTransport, timeout=timeout), ["here"] * size, function)


class TestTorchBetweenHosts(TransportSuite):
    """Two and two, who share memory by twos."""

    sizes = (4,)
    late = r"waited 0\.\d s in \w+ \d+ for (worker \d|the other workers)"  # a part of it, for whom that waits
    lost = r"(worker \d|a worker) is gone \(noticed in \w+ \d+\)"

    def gang(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        return processes(partial(between_hosts, name="torch", timeout=timeout), "aabb", function)

    def test_a_message_may_come_two_ways(self) -> None:
        """Through memory and through the network, which nobody can listen to at once."""
        sentence = "between hosts and within them, messages come two ways: use transport.messages"
        assert self.gang(4, listens_both_ways) == [sentence] * 4


NO_MPI = find_spec("mpi4py") is None or shutil.which("mpirun", path=str(Path(sys.executable).parent)) is None
GANGS: dict[int, MpiGang] = {}  # each is started once: that takes seconds


def started(size: int) -> MpiGang:
    if size not in GANGS:
        GANGS[size] = MpiGang(size)
    return GANGS[size]


@pytest.fixture(autouse=True, scope="module")
def _end_gangs() -> Iterator[None]:
    yield
    while GANGS:
        GANGS.popitem()[1].close()


@pytest.mark.skipif(NO_MPI, reason="mpi4py or mpirun is not installed")
class TestMpi(TransportSuite):
    sizes = (3,)
    late = TestTorch.late
    short = 0.3
    dies = None  # mpirun ends the whole job

    def gang(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        return started(size).run(partial(MpiTransport, timeout=timeout), ["here"] * size, function)

    def test_ranks_are_the_gangs(self) -> None:
        """Whatever mpirun numbered them."""
        assert started(3).run(backwards, ["here"] * 3, numbered) == [2, 1, 0]

    def test_another_number_of_processes_is_refused(self) -> None:
        expected = (
            "transport mpi: mpirun started 3 processes, the gang has 4: "
            "start it with --launcher mpi, or with mpirun -n 4 manyhands train ..."
        )
        assert self.gang(3, joins_a_larger_gang) == [expected] * 3

    def test_who_dies_ends_the_job(self, tmp_path: Path) -> None:
        """MPI itself does not say that a peer is gone; mpirun ends the others."""
        since = time.monotonic()
        job = mpirun(2, "from transports.gangs import dies_in_mpi; dies_in_mpi()", "", str(tmp_path))
        output, _ = job.communicate(timeout=60)
        assert job.returncode == 3, output
        assert "Exit code:    3" in output
        assert time.monotonic() - since < 30


def listens_both_ways(transport: Transport) -> str:
    with pytest.raises(UsageError) as caught:
        transport.recv_any(torch.zeros(1))
    return str(caught.value)


def backwards(info: RankInfo) -> MpiTransport:
    return MpiTransport(RankInfo(info.size - 1 - info.rank, info.hosts, info.channel))


def numbered(transport: Transport) -> int:
    assert torch.cat(transport.all_gather(torch.tensor([transport.rank]))).tolist() == [0, 1, 2]
    return transport.rank


def joins_a_larger_gang(transport: Transport) -> str:
    with pytest.raises(UsageError) as caught:
        MpiTransport(RankInfo(transport.rank, ("here",) * 4))
    return str(caught.value)


@pytest.mark.skipif(NO_MPI, reason="mpi4py or mpirun is not installed")
class TestMpiBetweenHosts(TransportSuite):
    sizes = (4,)
    short = 0.3
    late = TestTorchBetweenHosts.late
    dies = None

    def gang(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        return started(size).run(partial(between_hosts, name="mpi", timeout=timeout), "abab", function)
