"""Workers who exchange messages through torch.distributed: gloo for tensors on the CPU, NCCL on CUDA.

From one rank to another gloo carries everything, through main memory: NCCL does what a pair of ranks asks of
it in order, so two that send to each other and then receive wait for each other without end, and it has no
message from whoever comes first. A strategy may do both (a pipeline does at every micro-batch).
"""

from __future__ import annotations

import copy
import fcntl
import os
import re
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.core.addresses import listener
from manyhands.core.addresses import source as _source
from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.core.rank_info import RankInfo
from manyhands.transports import tensor_bytes
from manyhands.transports.base import CPU, PATIENCE, Awaited, Transport
from manyhands.transports.solo import SoloTransport
from manyhands.transports.waiting import late, lost, poll

T = TypeVar("T")

EAGER = 2**18  # bytes up to which a send does not wait for its receiver: gloo would, shm and MPI do not
IN_FLIGHT = 4  # such sends to one rank
FAREWELL = timedelta(seconds=5)  # how long sends may still take when all else is over

# What gloo can add; any other dtype is gathered and added here.
_SUMMED = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_CLOSED = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|closed by (the )?(remote|peer)"
    r"|socket closed|remote process exited|recvValue failed|failed to recv",
    re.IGNORECASE,
)


@final
class TorchTransport:
    """A process group; no memory is shared."""

    def __init__(self, info: RankInfo, *, device: torch.device = CPU, timeout: float = PATIENCE) -> None:
        if dist.is_initialized():
            raise UsageError("transport torch: torch.distributed is already in use in this process")
        self._backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        self.rank, self.size = info.rank, info.size
        self.peers_on_host: tuple[int, ...] = (info.rank,)
        self._members, self._timeout = tuple(range(info.size)), timeout
        self._owner = True
        self._begin()
        self._store, self._address = _rendezvous(info, timeout)
        self._do("connect", partial(self._connect, device))

    def _begin(self) -> None:
        self._calls: Counter[str] = Counter()
        self._sent: dict[int, deque[tuple[dist.Work, Tensor]]] = {}
        self._closed = False

    def _connect(self, device: torch.device) -> None:
        with _interface_towards(self._address):
            dist.init_process_group(
                self._backend,
                store=self._store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self._timeout),
                device_id=None if device.type == "cpu" else device,
            )
        group = dist.group.WORLD
        assert group is not None
        self.process_group: dist.ProcessGroup = group
        dist.barrier(
            group
        )  # until all have found each other rank 0, who keeps their addresses, may not leave

    def parts(self, groups: Sequence[tuple[int, ...]]) -> Transport:
        """The transport of this rank's group; all ranks must ask for the same groups."""
        mine: Transport = SoloTransport()
        for ranks in groups:
            members = tuple(self._members[rank] for rank in ranks)
            with _interface_towards(self._address):
                made = dist.new_group(list(members), timedelta(seconds=self._timeout), backend=self._backend)
            if self.rank in ranks and len(ranks) > 1:
                mine = part = copy.copy(self)
                part.rank, part.size = ranks.index(self.rank), len(ranks)
                part.peers_on_host, part._members = (part.rank,), members
                part.process_group, part._owner = made, False
                part._begin()
        # here, too, rank 0 may not leave until all have found each other
        self._do("connect", lambda: dist.barrier(self.process_group), count=0)
        return mine

    @property
    def on_host(self) -> SoloTransport:
        """No memory is shared."""
        return SoloTransport()

    @property
    def across(self) -> TorchTransport:
        """All of it."""
        return self

    @property
    def messages(self) -> TorchTransport:
        """Itself."""
        return self

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """In gloo's or NCCL's order: fixed, and the same at every rank."""
        if tensor.dtype not in _SUMMED:
            parts = self._gather("all_reduce", tensor)
            tensor.detach().copy_(tensor_bytes.add_in_order(parts, torch.empty_like(parts[0])))
            return tensor
        whole = self._row(tensor)
        self._do("all_reduce", lambda: dist.all_reduce(whole, group=self.process_group))
        return tensor_bytes.back(whole, tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """As bytes, so that any dtype will do."""
        whole = self._row(tensor)
        message = tensor_bytes.as_bytes(whole)
        self._do("broadcast", lambda: dist.broadcast(message, group=self.process_group, group_src=root))
        return tensor_bytes.back(whole, tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """First the shapes, then all as long as the longest."""
        return [part.to(tensor.device) for part in self._gather("all_gather", tensor)]

    def send(self, tensor: Tensor, to: int, ahead: int = 0) -> None:
        """A small tensor is copied and on its way; a large one is waited for, unless it may be ahead."""
        whole = tensor_bytes.row(tensor)
        most = max(ahead, IN_FLIGHT if whole.nbytes <= EAGER else 0)
        if most and whole.data_ptr() == tensor.data_ptr():
            whole = whole.clone()
        sent = self._sent.setdefault(to, deque())

        def post() -> None:
            work = dist.isend(tensor_bytes.as_bytes(whole), group=self.process_group, group_dst=to)
            assert work is not None
            sent.append((work, whole))
            while len(sent) > most:
                sent.popleft()[0].wait()

        self._do("send", post, to)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """Waits until all of it is there."""
        whole = tensor_bytes.row(tensor)
        message = tensor_bytes.as_bytes(whole)
        self._do("recv", lambda: dist.recv(message, group=self.process_group, group_src=source), source)
        return tensor_bytes.back(whole, tensor)

    def recv_any(self, tensor: Tensor) -> int:
        """Waits until all of the first is there."""
        whole = tensor_bytes.row(tensor)
        message = tensor_bytes.as_bytes(whole)
        source: int = self._do("recv_any", lambda: dist.recv(message, group=self.process_group))
        tensor_bytes.back(whole, tensor)
        return self._members.index(source)

    def barrier(self) -> None:
        """A round of messages."""
        self._do("barrier", lambda: dist.barrier(self.process_group))

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
        """Wait a little for what is on its way, then end the group."""
        if self._closed:
            return
        self._closed = True
        for sent in self._sent.values():
            with suppress(RuntimeError):
                for work, _ in sent:
                    work.wait(FAREWELL)
        self._sent.clear()
        if self._owner and dist.is_initialized():
            dist.destroy_process_group()

    def _row(self, tensor: Tensor) -> Tensor:
        return tensor_bytes.row(tensor, stay=self._backend != "gloo")

    def _gather(self, operation: str, tensor: Tensor) -> list[Tensor]:
        group, whole = self.process_group, self._row(tensor)
        headers = [torch.empty(tensor_bytes.HEADER, dtype=torch.int64) for _ in range(self.size)]
        self._do(operation, lambda: dist.all_gather(headers, tensor_bytes.header(tensor), group=group))
        rooms = [tensor_bytes.room(header.tolist(), whole.device) for header in headers]
        longest = max(room.nbytes for room in rooms)
        padded = torch.zeros(longest, dtype=torch.uint8, device=whole.device)
        padded[: whole.nbytes].copy_(tensor_bytes.as_bytes(whole))
        rows = [torch.empty_like(padded) for _ in range(self.size)]
        self._do(operation, lambda: dist.all_gather(rows, padded, group=group), count=0)
        for room, row in zip(rooms, rows, strict=True):
            tensor_bytes.as_bytes(room.view(-1)).copy_(row[: room.nbytes])
        return rooms

    def _do(self, operation: str, call: Callable[[], T], peer: int | None = None, count: int = 1) -> T:
        self._calls[operation] += count
        try:
            return call()
        except RuntimeError as error:
            raise self._explained(error, operation, peer) from error

    def _explained(self, error: RuntimeError, operation: str, peer: int | None) -> Exception:
        """The library's words as ours; its own stay the cause."""
        doing = f"{operation} {self._calls[operation]:,}"
        who = [] if peer is None else [self._members[peer]]  # gloo does not say who
        if _TIMED_OUT.search(str(error)):
            return late(self._timeout, doing, who)
        return lost(doing, who) if _CLOSED.search(str(error)) else error


def _rendezvous(info: RankInfo, timeout: float) -> tuple[Any, str]:
    """A store that rank 0 keeps on a port of its own and tells the others by the line, and its address."""
    patience = timedelta(seconds=timeout)
    address = _address(info) if info.rank == 0 else ""
    kept = _keep(address, patience) if info.rank == 0 else None
    address, port = info.channel.exchange((address, kept.port) if kept else None)[0]
    try:
        return kept or _store(address, port, patience), address
    except RuntimeError as error:
        raise ManyhandsError(
            f"transport torch: worker {info.rank} on {info.host} cannot reach worker 0 at {address}:{port} "
            "(at worker 0, MASTER_ADDR says by which address others reach it)"
        ) from error


def _keep(address: str, patience: timedelta) -> Any:
    """The store itself, at one address: left alone it listens on all, and asks nobody for a password."""
    try:
        listening = listener(address, 0)
    except OSError as error:
        raise UsageError(
            f"transport torch: worker 0 cannot listen at {address}: {error.strerror or error} "
            "(MASTER_ADDR says by which address of its host others reach it)"
        ) from error
    port = listening.getsockname()[1]
    return _store(address, port, patience, is_master=True, master_listen_fd=listening.detach())


def _store(address: str, port: int, patience: timedelta, **keeping: Any) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, timeout=patience, wait_for_workers=False, **keeping
    )


def _address(info: RankInfo) -> str:
    """By which the workers of all hosts reach this one."""
    others = [host for host in info.hosts if host != info.host]
    if not others:
        return "127.0.0.1"
    if given := os.environ.get("MASTER_ADDR"):
        return given
    try:  # the name of a host may stand for its loopback; the way to another one leads out of the right door
        return _source(others[0])
    except OSError:
        return socket.gethostname()


@contextmanager
def _interface_towards(address: str) -> Iterator[None]:
    """Let gloo use the interface that leads to the store, unless someone chose one.

    Left alone it looks up this host's name, which may not resolve, or to a loopback no other host can reach.
    """
    name = "GLOO_SOCKET_IFNAME"
    found = None if name in os.environ else _interface(address)
    if found is not None:
        os.environ[name] = found
    try:
        yield
    finally:
        if found is not None:
            del os.environ[name]


def _interface(address: str) -> str | None:
    get_address = 0x8915  # SIOCGIFADDR of Linux
    try:
        ours = socket.inet_aton(_source(address))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # an interface without an address
                    request = struct.pack("256s", name.encode()[:15])
                    if fcntl.ioctl(probe, get_address, request)[20:24] == ours:
                        return name
    except OSError:
        pass
    return None
