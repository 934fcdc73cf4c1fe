"""Workers that exchange messages through MPI (mpi4py).

All calls are non-blocking and are polled here: MPI's own waits have no timeout, and spin on a core that a
peer may need.
"""

from __future__ import annotations

import atexit
import copy
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.core.rank_info import RankInfo
from manyhands.transports import tensor_bytes
from manyhands.transports.base import CPU, DEFAULT_TIMEOUT, Transport
from manyhands.transports.send_queue import SendQueue, buffer_for
from manyhands.transports.solo import SoloTransport
from manyhands.transports.transport_defaults import TransportDefaults
from manyhands.transports.waiting import Wait, deadline_error, peer_lost_error, spins

PIECE = 2**28  # elements per call: MPI counts in 32 bits
CLOSE_TIMEOUT = 5.0  # seconds that sends in flight may still take when the transport is closed
FINALIZE_TIMEOUT = 300.0  # seconds to wait for the other ranks to end: rank 0 may have a model to save
TEST_COST = 10  # testing a request costs as much as 10 reads of a flag

# Dtypes that MPI can sum. Others are gathered and summed here.
_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int16: "INT16_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
}
_broken = False  # an operation of MPI is in flight that will never end


@final
class MpiTransport(TransportDefaults):
    """A communicator of its own. No memory is shared."""

    def __init__(
        self, info: RankInfo, *, device: torch.device = CPU, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        mpi = _library()
        world = mpi.COMM_WORLD
        if world.size != info.size:
            started = f"{world.size} process{'es' if world.size > 1 else ''}"
            raise UsageError(
                f"transport mpi: mpirun started {started}, but the run has {info.size}: "
                f"start it with --launcher mpi, or with mpirun -n {info.size} manyhands train ..."
            )
        self._mpi, self._timeout = mpi, timeout
        self._members = tuple(range(info.size))
        self._spins = spins(len(info.peers_on_host)) // TEST_COST
        self._join(world.Split(0, info.rank))  # in the order of the run's ranks, not of mpirun's

    def _join(self, comm: Any) -> None:
        self._comm = comm
        self.rank, self.size = int(comm.rank), int(comm.size)
        self.peers_on_host: tuple[int, ...] = (self.rank,)
        self._calls: Counter[str] = Counter()
        self._sends: SendQueue[Any] = SendQueue()
        self._closed = False
        self._parts: list[MpiTransport] = []  # of groups

    def split(self, groups: Sequence[tuple[int, ...]]) -> Transport:
        number, mine = next((n, ranks) for n, ranks in enumerate(groups) if self.rank in ranks)
        part = copy.copy(self)
        part._members = tuple(self._members[rank] for rank in mine)
        part._join(self._comm.Split(number, mine.index(self.rank)))
        self._parts.append(part)
        return part if len(mine) > 1 else SoloTransport()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum in MPI's order, which is fixed and the same at every rank."""
        self._calls["all_reduce"] += 1
        if tensor.dtype not in _TYPES:
            parts = self._gather("all_reduce", tensor)
            tensor.detach().copy_(tensor_bytes.add_in_order(parts, torch.empty_like(parts[0])))
            return tensor
        whole = tensor_bytes.flatten(tensor)
        kind = getattr(self._mpi, _TYPES[tensor.dtype])
        for begin in range(0, whole.numel(), PIECE):
            part = whole[begin : begin + PIECE]
            buffer = [self._memory(part), part.numel(), kind]
            self._finish(self._comm.Iallreduce(self._mpi.IN_PLACE, buffer), "all_reduce")
        return tensor_bytes.copy_back(whole, tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Broadcast as bytes, so that any dtype works."""
        self._calls["broadcast"] += 1
        whole = tensor_bytes.flatten(tensor)
        self._broadcast("broadcast", tensor_bytes.as_bytes(whole), root)
        return tensor_bytes.copy_back(whole, tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather the headers, then broadcast from each rank."""
        self._calls["all_gather"] += 1
        return [part.to(tensor.device) for part in self._gather("all_gather", tensor)]

    def send(self, tensor: Tensor, to: int, ahead: int = 0) -> None:
        """Copy a small tensor and return. Wait for the receiver of a large one, unless it may be ahead."""
        self._calls["send"] += 1
        buffer, limit = buffer_for(tensor, ahead)
        message = tensor_bytes.as_bytes(buffer)
        for begin in range(0, max(message.numel(), 1), PIECE):
            part = message[begin : begin + PIECE]
            request = self._comm.Isend([self._memory(part), part.numel(), self._mpi.BYTE], to)
            self._sends.add(to, request, buffer)
        for oldest in self._sends.excess(to, limit):
            self._finish(oldest, "send", to)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        self._calls["recv"] += 1
        whole = tensor_bytes.flatten(tensor)
        message = tensor_bytes.as_bytes(whole)
        status = self._mpi.Status()
        for begin in range(0, max(message.numel(), 1), PIECE):
            part = message[begin : begin + PIECE]
            request = self._comm.Irecv([self._memory(part), part.numel(), self._mpi.BYTE], source)
            self._finish(request, "recv", source, status)
            if (came := status.Get_count(self._mpi.BYTE)) != part.numel():
                raise ManyhandsError(
                    f"recv {self._calls['recv']:,}: received {came:,} bytes, expected {part.numel():,}"
                )
        return tensor_bytes.copy_back(whole, tensor)

    def recv_any(self, tensor: Tensor) -> int:
        """Probe for the first message, then receive it."""
        self._calls["recv_any"] += 1
        status, wait = self._mpi.Status(), Wait(self._timeout)
        while not self._comm.Iprobe(status=status):
            if wait.rest() and wait.expired:
                _give_up()
                raise deadline_error(self._timeout, f"recv_any {self._calls['recv_any']:,}")
        source = int(status.Get_source())
        self.recv(tensor, source)
        return source

    def barrier(self) -> None:
        self._calls["barrier"] += 1
        self._finish(self._comm.Ibarrier(), "barrier")

    def close(self) -> None:
        """Wait a few seconds for sends in flight, then free the communicator."""
        if self._closed:
            return
        self._closed = True
        for part in self._parts:
            part.close()
        if sys.exc_info()[0] is not None:
            _give_up()  # closed after a failure: the other ranks may never end
        end = time.monotonic() + CLOSE_TIMEOUT
        in_flight = [request for requests in self._sends.by_destination() for request in requests]
        with suppress(self._mpi.Exception):
            while not self._mpi.Request.Testall(in_flight) and time.monotonic() < end:
                time.sleep(1e-3)
            if not _broken:
                self._comm.Free()

    def _gather(self, operation: str, tensor: Tensor) -> list[Tensor]:
        mine = tensor_bytes.header(tensor)
        headers = torch.empty(self.size, tensor_bytes.HEADER, dtype=torch.int64)
        kind = self._mpi.INT64_T
        request = self._comm.Iallgather(
            [self._memory(mine), tensor_bytes.HEADER, kind],
            [self._memory(headers), tensor_bytes.HEADER, kind],
        )
        self._finish(request, operation)
        gathered = [tensor_bytes.allocate(header) for header in headers.tolist()]
        gathered[self.rank].copy_(tensor.detach())
        for root, part in enumerate(gathered):
            self._broadcast(operation, tensor_bytes.as_bytes(part.view(-1)), root)
        return gathered

    def _broadcast(self, operation: str, message: Tensor, root: int) -> None:
        for begin in range(0, message.numel(), PIECE):
            part = message[begin : begin + PIECE]
            buffer = [self._memory(part), part.numel(), self._mpi.BYTE]
            self._finish(self._comm.Ibcast(buffer, root), operation)

    def _memory(self, row: Tensor) -> Any:
        return self._mpi.buffer.fromaddress(row.data_ptr(), row.nbytes)

    def _finish(self, request: Any, operation: str, peer: int | None = None, status: Any = None) -> None:
        """Test a request until it has ended: spin first, then rest between tests."""
        peers = [] if peer is None else [self._members[peer]]
        call = f"{operation} {self._calls[operation]:,}"
        try:
            for _ in range(self._spins):
                if request.Test(status):
                    return
            wait = Wait(self._timeout)
            while not request.Test(status):
                if wait.rest() and wait.expired:
                    _give_up()
                    raise deadline_error(self._timeout, call, peers)
        except self._mpi.Exception as error:
            _give_up()
            if error.Get_error_class() == getattr(self._mpi, "ERR_PROC_FAILED", None):
                raise peer_lost_error(call, peers) from error
            raise ManyhandsError(f"MPI failed in {call}: {error.Get_error_string()}") from error


def _library() -> Any:
    """MPI, which is initialized by its first import. After a first import here, it is finalized here too."""
    first = "mpi4py.MPI" not in sys.modules
    # Without its hardware this component prints warnings, and one-sided communication is not used here.
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")
    try:
        import mpi4py

        if first:
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            "transport mpi needs mpi4py and an MPI library: pip install 'manyhands[mpi]'"
        ) from error
    if first:
        atexit.register(_end, MPI)
    return MPI


def _give_up() -> None:
    global _broken  # noqa: PLW0603 there is one MPI per process
    _broken = True


def _end(mpi: Any) -> None:
    """Finalize MPI when all ranks have ended. `Finalize` alone would wait without a timeout."""
    if _broken or mpi.Is_finalized():
        return
    wait = Wait(FINALIZE_TIMEOUT)
    request = mpi.COMM_WORLD.Ibarrier()
    while not request.Test():
        if wait.rest() and wait.expired:
            return  # mpirun notices a process that ended without Finalize
    mpi.Finalize()
