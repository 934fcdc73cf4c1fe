"""Workers who exchange messages through MPI (mpi4py).

All calls are the non-blocking ones and are polled here: MPI's own waits have no deadline, and spin for
ever on a core that a peer may need.
"""

from __future__ import annotations

import atexit
import copy
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, final

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.core.rank_info import RankInfo
from manyhands.transports import tensor_bytes
from manyhands.transports.base import CPU, PATIENCE, Awaited, Transport
from manyhands.transports.solo import SoloTransport
from manyhands.transports.waiting import Wait, late, lost, poll, spins

PIECE = 2**28  # elements of one call: MPI counts in 32 bits
EAGER = 2**18  # bytes up to which a send does not wait for its receiver, whatever this MPI's own limit is
IN_FLIGHT = 4  # such sends to one rank
FAREWELL = 5.0  # seconds that sends may still take when all else is over
LAST_WAIT = 300.0  # seconds for the others to come to their ends: rank 0 may have a model to save
LOOK_COST = 10  # one look at a request costs as much as so many at a flag

# What MPI can add; any other dtype is gathered and added here.
_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int16: "INT16_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
}
_broken = False  # MPI has something under way that will never end


@final
class MpiTransport:
    """A communicator of its own; no memory is shared."""

    def __init__(self, info: RankInfo, *, device: torch.device = CPU, timeout: float = PATIENCE) -> None:
        mpi = _library()
        world = mpi.COMM_WORLD
        if world.size != info.size:
            started = f"{world.size} process{'es' if world.size > 1 else ''}"
            raise UsageError(
                f"transport mpi: mpirun started {started}, the gang has {info.size}: "
                f"start it with --launcher mpi, or with mpirun -n {info.size} manyhands train ..."
            )
        self._mpi, self._timeout = mpi, timeout
        self._members = tuple(range(info.size))
        self._looks = spins(len(info.peers_on_host)) // LOOK_COST
        self._join(world.Split(0, info.rank))  # ranks are the gang's, whatever order mpirun gave them

    def _join(self, comm: Any) -> None:
        self._comm = comm
        self.rank, self.size = int(comm.rank), int(comm.size)
        self.peers_on_host: tuple[int, ...] = (self.rank,)
        self._calls: Counter[str] = Counter()
        self._sent: dict[int, deque[tuple[Any, Tensor]]] = {}
        self._closed = False
        self._made: list[MpiTransport] = []  # of parts of this one

    def parts(self, groups: Sequence[tuple[int, ...]]) -> Transport:
        """The transport of this rank's group; all ranks must ask for the same groups."""
        number, mine = next((n, ranks) for n, ranks in enumerate(groups) if self.rank in ranks)
        part = copy.copy(self)
        part._members = tuple(self._members[rank] for rank in mine)
        part._join(self._comm.Split(number, mine.index(self.rank)))
        self._made.append(part)
        return part if len(mine) > 1 else SoloTransport()

    @property
    def on_host(self) -> SoloTransport:
        """No memory is shared."""
        return SoloTransport()

    @property
    def across(self) -> MpiTransport:
        """All of it."""
        return self

    @property
    def messages(self) -> MpiTransport:
        """Itself."""
        return self

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """In MPI's order: fixed, and the same at every rank."""
        self._calls["all_reduce"] += 1
        if tensor.dtype not in _TYPES:
            parts = self._gather("all_reduce", tensor)
            tensor.detach().copy_(tensor_bytes.add_in_order(parts, torch.empty_like(parts[0])))
            return tensor
        whole = tensor_bytes.row(tensor)
        kind = getattr(self._mpi, _TYPES[tensor.dtype])
        for begin in range(0, whole.numel(), PIECE):
            part = whole[begin : begin + PIECE]
            buffer = [self._memory(part), part.numel(), kind]
            self._finish(self._comm.Iallreduce(self._mpi.IN_PLACE, buffer), "all_reduce")
        return tensor_bytes.back(whole, tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """As bytes, so that any dtype will do."""
        self._calls["broadcast"] += 1
        whole = tensor_bytes.row(tensor)
        self._cast("broadcast", tensor_bytes.as_bytes(whole), root)
        return tensor_bytes.back(whole, tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """First the shapes, then a broadcast from each."""
        self._calls["all_gather"] += 1
        return [part.to(tensor.device) for part in self._gather("all_gather", tensor)]

    def send(self, tensor: Tensor, to: int, ahead: int = 0) -> None:
        """A small tensor is copied and on its way; a large one is waited for, unless it may be ahead."""
        self._calls["send"] += 1
        whole = tensor_bytes.row(tensor)
        most = max(ahead, IN_FLIGHT if whole.nbytes <= EAGER else 0)
        if most and whole.data_ptr() == tensor.data_ptr():
            whole = whole.clone()
        message = tensor_bytes.as_bytes(whole)
        sent = self._sent.setdefault(to, deque())
        for begin in range(0, max(message.numel(), 1), PIECE):
            part = message[begin : begin + PIECE]
            sent.append((self._comm.Isend([self._memory(part), part.numel(), self._mpi.BYTE], to), whole))
        while len(sent) > most:
            self._finish(sent.popleft()[0], "send", to)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """Waits until all of it is there."""
        self._calls["recv"] += 1
        whole = tensor_bytes.row(tensor)
        message = tensor_bytes.as_bytes(whole)
        status = self._mpi.Status()
        for begin in range(0, max(message.numel(), 1), PIECE):
            part = message[begin : begin + PIECE]
            request = self._comm.Irecv([self._memory(part), part.numel(), self._mpi.BYTE], source)
            self._finish(request, "recv", source, status)
            if (came := status.Get_count(self._mpi.BYTE)) != part.numel():
                raise ManyhandsError(
                    f"recv {self._calls['recv']:,}: {came:,} bytes came where {part.numel():,} were expected"
                )
        return tensor_bytes.back(whole, tensor)

    def recv_any(self, tensor: Tensor) -> int:
        """Asks which comes first, then receives it."""
        self._calls["recv_any"] += 1
        status, wait = self._mpi.Status(), Wait(self._timeout)
        while not self._comm.Iprobe(status=status):
            if wait.rest() and wait.over:
                _give_up()
                raise late(self._timeout, f"recv_any {self._calls['recv_any']:,}")
        source = int(status.Get_source())
        self.recv(tensor, source)
        return source

    def barrier(self) -> None:
        """MPI's own."""
        self._calls["barrier"] += 1
        self._finish(self._comm.Ibarrier(), "barrier")

    def share(self, name: str, nbytes: int) -> Tensor:
        """Memory of its own."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def exclusive(self, number: int = 0) -> AbstractContextManager[object]:
        """No memory is shared."""
        return nullcontext()

    def until(self, ready: Callable[[], bool], seconds: float, what: Awaited = "work") -> bool:
        """By looking again and again."""
        return poll(ready, seconds)

    def ring(self) -> None:
        """Who waits looks by itself."""

    def copy_shared(self, tensor: Tensor, out: Tensor) -> Tensor:
        """A copy in memory of its own."""
        return out.copy_(tensor)

    def add_shared(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        """The sum in their order."""
        return tensor_bytes.add_in_order(parts, out)

    def close(self) -> None:
        """Wait a little for what is on its way, then give the communicator back."""
        if self._closed:
            return
        self._closed = True
        for part in self._made:
            part.close()
        if sys.exc_info()[0] is not None:
            _give_up()  # closed because something failed: the others may never come to an end
        end = time.monotonic() + FAREWELL
        under_way = [request for sent in self._sent.values() for request, _ in sent]
        with suppress(self._mpi.Exception):
            while not self._mpi.Request.Testall(under_way) and time.monotonic() < end:
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
        rooms = [tensor_bytes.room(numbers) for numbers in headers.tolist()]
        rooms[self.rank].copy_(tensor.detach())
        for root, room in enumerate(rooms):
            self._cast(operation, tensor_bytes.as_bytes(room.view(-1)), root)
        return rooms

    def _cast(self, operation: str, message: Tensor, root: int) -> None:
        for begin in range(0, message.numel(), PIECE):
            part = message[begin : begin + PIECE]
            buffer = [self._memory(part), part.numel(), self._mpi.BYTE]
            self._finish(self._comm.Ibcast(buffer, root), operation)

    def _memory(self, row: Tensor) -> Any:
        return self._mpi.buffer.fromaddress(row.data_ptr(), row.nbytes)

    def _finish(self, request: Any, operation: str, peer: int | None = None, status: Any = None) -> None:
        """Poll until it is done, resting in between."""
        who = [] if peer is None else [self._members[peer]]
        doing = f"{operation} {self._calls[operation]:,}"
        try:
            for _ in range(self._looks):
                if request.Test(status):
                    return
            wait = Wait(self._timeout)
            while not request.Test(status):
                if wait.rest() and wait.over:
                    _give_up()
                    raise late(self._timeout, doing, who)
        except self._mpi.Exception as error:
            _give_up()
            if error.Get_error_class() == getattr(self._mpi, "ERR_PROC_FAILED", None):
                raise lost(doing, who) from error
            raise ManyhandsError(f"MPI failed in {doing}: {error.Get_error_string()}") from error


def _library() -> Any:
    """MPI, initialized by importing it; where this is the first import, it is ended here too."""
    first = "mpi4py.MPI" not in sys.modules
    # Without the hardware for it this component only complains; nothing here is one-sided.
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")
    try:
        import mpi4py

        if first:
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError("transport mpi needs mpi4py and an MPI: pip install 'manyhands[mpi]'") from error
    if first:
        atexit.register(_end, MPI)
    return MPI


def _give_up() -> None:
    global _broken  # noqa: PLW0603 there is one MPI a process
    _broken = True


def _end(mpi: Any) -> None:
    """End MPI when all have come to their ends; its own end would wait without a deadline."""
    if _broken or mpi.Is_finalized():
        return
    wait = Wait(LAST_WAIT)
    request = mpi.COMM_WORLD.Ibarrier()
    while not request.Test():
        if wait.rest() and wait.over:
            return  # whoever started the processes sees one that ended without MPI's end
    mpi.Finalize()
