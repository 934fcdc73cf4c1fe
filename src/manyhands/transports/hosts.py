"""Several hosts: workers of one host share memory, workers with the same local rank exchange messages.

                 worker 0   worker 1
    host a          0 ──shm── 1            a row:     memory, `on_host`
                    │         │            a column:  messages, `across`
    host b          2 ──shm── 3

A sum goes along the rows, then each column sums its slice, then each row broadcasts the slices. So the bytes
that cross the network depend on the number of hosts, not on the number of workers per host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import final

import torch
from torch import Tensor

from manyhands.core.rank_info import RankInfo
from manyhands.transports import rank_grid, tensor_bytes
from manyhands.transports.base import CPU, DEFAULT_TIMEOUT, Awaited, MessageTransport, Transport
from manyhands.transports.shm.transport import ShmTransport


@final
class HostsTransport:
    """Shared memory within hosts, messages between them. All hosts have the same number of workers."""

    def __init__(
        self,
        info: RankInfo,
        *,
        between: Callable[..., MessageTransport],
        device: torch.device = CPU,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.rank, self.size = info.rank, info.size
        rows, columns = rank_grid.rows(info.hosts), rank_grid.columns(info.hosts)
        self.peers_on_host = rank_grid.group_of(self.rank, rows)
        self._row_of = {rank: number for number, row in enumerate(rows) for rank in row}
        self._column_of = {rank: number for number, column in enumerate(columns) for rank in column}
        self.messages = between(info, device=device, timeout=timeout)
        self.on_host: Transport = ShmTransport(info, device=device, timeout=timeout)
        self.across = self.messages.split(columns)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        whole = tensor_bytes.flatten(tensor, keep_device=True)
        slices = tensor_bytes.slices(whole.numel(), self.on_host.size)
        self.on_host.all_reduce(whole)
        mine = whole[slices[self.on_host.rank]]
        if mine.numel():
            self.across.all_reduce(mine)
        for worker, part in enumerate(slices):
            if part.start < part.stop:
                self.on_host.broadcast(whole[part], worker)
        return tensor_bytes.copy_back(whole, tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Along the root's column, then along each row."""
        if self._column_of[self.rank] == self._column_of[root]:
            self.across.broadcast(tensor, self._row_of[root])
        return self.on_host.broadcast(tensor, self._column_of[root])

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self.messages.all_gather(tensor)

    def send(self, tensor: Tensor, to: int, ahead: int = 0) -> None:
        """Through shared memory to a peer on this host, as a message to any other rank."""
        if to in self.peers_on_host:
            self.on_host.send(tensor, self._column_of[to], ahead)
        else:
            self.messages.send(tensor, to, ahead)

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        if source in self.peers_on_host:
            return self.on_host.recv(tensor, self._column_of[source])
        return self.messages.recv(tensor, source)

    def barrier(self) -> None:
        """Each row, then the first column, then each row again."""
        self.on_host.barrier()
        if self._column_of[self.rank] == 0:
            self.across.barrier()
        self.on_host.barrier()

    def share(self, name: str, nbytes: int) -> Tensor:
        return self.on_host.share(name, nbytes)

    def lock(self, number: int = 0) -> AbstractContextManager[object]:
        return self.on_host.lock(number)

    def wait_for(self, ready: Callable[[], bool], seconds: float, what: Awaited = "work") -> bool:
        return self.on_host.wait_for(ready, seconds, what)

    def notify(self) -> None:
        self.on_host.notify()

    def copy_shared(self, tensor: Tensor, out: Tensor) -> Tensor:
        return self.on_host.copy_shared(tensor, out)

    def add_shared(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        return self.on_host.add_shared(parts, out)

    def close(self) -> None:
        for transport in (self.on_host, self.across, self.messages):
            transport.close()
