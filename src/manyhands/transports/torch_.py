"""Workers that exchange messages through torch.distributed: gloo for tensors on the CPU, NCCL on CUDA.

Messages from one rank to another always go through gloo and main memory. NCCL executes the operations of a
pair of ranks in order, so two ranks that send to each other and then receive would deadlock (neighbors in a
pipeline do so at every micro-batch). And NCCL cannot receive from any rank.
"""

from __future__ import annotations

import copy
import fcntl
import os
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from manyhands.transports.base import CPU, DEFAULT_TIMEOUT, Transport
from manyhands.transports.send_queue import SendQueue, buffer_for
from manyhands.transports.solo import SoloTransport
from manyhands.transports.transport_defaults import TransportDefaults
from manyhands.transports.waiting import deadline_error, peer_lost_error

T = TypeVar("T")

CLOSE_TIMEOUT = timedelta(seconds=5)  # that sends in flight may still take when the transport is closed

# Dtypes that gloo can sum. Others are gathered and summed here.
_SUMMABLE = {
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
class TorchTransport(TransportDefaults):
    """A process group. No memory is shared."""

    def __init__(
        self, info: RankInfo, *, device: torch.device = CPU, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
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
        self._sends: SendQueue[dist.Work] = SendQueue()
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
        # Rank 0 keeps the store: it may not leave before all ranks have found each other.
        dist.barrier(group)

    def split(self, groups: Sequence[tuple[int, ...]]) -> Transport:
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
        # Here, too, rank 0 may not leave before all ranks have found each other.
        self._do("connect", lambda: dist.barrier(self.process_group), count=0)
        return mine

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum in the order of gloo or NCCL, which is fixed and the same at every rank."""
        if tensor.dtype not in _SUMMABLE:
            parts = self._gather("all_reduce", tensor)
            tensor.detach().copy_(tensor_bytes.add_in_order(parts, torch.empty_like(parts[0])))
            return tensor
        whole = self._row(tensor)
        self._do("all_reduce", lambda: dist.all_reduce(whole, group=self.process_group))
        return tensor_bytes.copy_back(whole, tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Broadcast as bytes, so that any dtype works."""
        whole = self._row(tensor)
        message = tensor_bytes.as_bytes(whole)
        self._do("broadcast", lambda: dist.broadcast(message, group=self.process_group, group_src=root))
        return tensor_bytes.copy_back(whole, tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather the headers, then the tensors, padded to the longest."""
        return [part.to(tensor.device) for part in self._gather("all_gather", tensor)]

    def send(self, tensor: Tensor, to: int, ahead: int = 0) -> None:
        """Copy a small tensor and return. Wait for the receiver of a large one, unless it may be ahead."""
        buffer, limit = buffer_for(tensor, ahead)

        def post() -> None:
            work = dist.isend(tensor_bytes.as_bytes(buffer), group=self.process_group, group_dst=to)
            assert work is not None
            self._sends.add(to, work, buffer)
            for oldest in self._sends.excess(to, limit):
                oldest.wait()

        self._do("send", post, to)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        whole = tensor_bytes.flatten(tensor)
        message = tensor_bytes.as_bytes(whole)
        self._do("recv", lambda: dist.recv(message, group=self.process_group, group_src=source), source)
        return tensor_bytes.copy_back(whole, tensor)

    def recv_any(self, tensor: Tensor) -> int:
        whole = tensor_bytes.flatten(tensor)
        message = tensor_bytes.as_bytes(whole)
        source: int = self._do("recv_any", lambda: dist.recv(message, group=self.process_group))
        tensor_bytes.copy_back(whole, tensor)
        return self._members.index(source)

    def barrier(self) -> None:
        self._do("barrier", lambda: dist.barrier(self.process_group))

    def close(self) -> None:
        """Wait a few seconds for sends in flight, then destroy the group."""
        if self._closed:
            return
        self._closed = True
        for works in self._sends.by_destination():
            with suppress(RuntimeError):
                for work in works:
                    work.wait(CLOSE_TIMEOUT)
        self._sends.clear()
        if self._owner and dist.is_initialized():
            dist.destroy_process_group()

    def _row(self, tensor: Tensor) -> Tensor:
        return tensor_bytes.flatten(tensor, keep_device=self._backend != "gloo")

    def _gather(self, operation: str, tensor: Tensor) -> list[Tensor]:
        group, whole = self.process_group, self._row(tensor)
        headers = [torch.empty(tensor_bytes.HEADER, dtype=torch.int64) for _ in range(self.size)]
        self._do(operation, lambda: dist.all_gather(headers, tensor_bytes.header(tensor), group=group))
        gathered = [tensor_bytes.allocate(header.tolist(), whole.device) for header in headers]
        longest = max(part.nbytes for part in gathered)
        padded = torch.zeros(longest, dtype=torch.uint8, device=whole.device)
        padded[: whole.nbytes].copy_(tensor_bytes.as_bytes(whole))
        rows = [torch.empty_like(padded) for _ in range(self.size)]
        self._do(operation, lambda: dist.all_gather(rows, padded, group=group), count=0)
        for part, row in zip(gathered, rows, strict=True):
            tensor_bytes.as_bytes(part.view(-1)).copy_(row[: part.nbytes])
        return gathered

    def _do(self, operation: str, call: Callable[[], T], peer: int | None = None, count: int = 1) -> T:
        self._calls[operation] += count
        try:
            return call()
        except RuntimeError as error:
            raise self._translated(error, operation, peer) from error

    def _translated(self, error: RuntimeError, operation: str, peer: int | None) -> Exception:
        """The library's error as one of ours. The original stays its cause."""
        call = f"{operation} {self._calls[operation]:,}"
        peers = [] if peer is None else [self._members[peer]]  # in a collective gloo does not say which
        if _TIMED_OUT.search(str(error)):
            return deadline_error(self._timeout, call, peers)
        return peer_lost_error(call, peers) if _CLOSED.search(str(error)) else error


def _rendezvous(info: RankInfo, timeout: float) -> tuple[Any, str]:
    """The store of rank 0, and its address, which the ranks learn through the control channel."""
    limit = timedelta(seconds=timeout)
    address = _address(info) if info.rank == 0 else ""
    own = _host_store(address, limit) if info.rank == 0 else None
    address, port = info.channel.exchange((address, own.port) if own else None)[0]
    try:
        return own or _store(address, port, limit), address
    except RuntimeError as error:
        raise ManyhandsError(
            f"transport torch: worker {info.rank} on {info.host} cannot reach worker 0 at {address}:{port} "
            "(set MASTER_ADDR at worker 0 to the address at which other hosts reach it)"
        ) from error


def _host_store(address: str, timeout: timedelta) -> Any:
    """The store itself, at one address only: by default it would listen on all, without a password."""
    try:
        listening = listener(address, 0)
    except OSError as error:
        raise UsageError(
            f"transport torch: worker 0 cannot listen at {address}: {error.strerror or error} "
            "(set MASTER_ADDR to the address at which other hosts reach worker 0)"
        ) from error
    port = listening.getsockname()[1]
    return _store(address, port, timeout, is_master=True, master_listen_fd=listening.detach())


def _store(address: str, port: int, timeout: timedelta, **master: Any) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, timeout=timeout, wait_for_workers=False, **master
    )


def _address(info: RankInfo) -> str:
    """The address at which the workers of all hosts reach this one."""
    others = [host for host in info.hosts if host != info.host]
    if not others:
        return "127.0.0.1"
    if given := os.environ.get("MASTER_ADDR"):
        return given
    try:  # a host name may resolve to its loopback; the route to another host shows the right interface
        return _source(others[0])
    except OSError:
        return socket.gethostname()


@contextmanager
def _interface_towards(address: str) -> Iterator[None]:
    """Let gloo use the interface that leads to the store, unless GLOO_SOCKET_IFNAME is set.

    By default gloo resolves the name of this host. That may fail, or give a loopback that no other host
    can reach.
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
