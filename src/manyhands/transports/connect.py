"""Build the transport of one worker from its name and the worker's rank information, or refuse it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from manyhands.core import registry
from manyhands.core.errors import UsageError
from manyhands.core.rank_info import RankInfo
from manyhands.transports import TRANSPORTS, rank_grid

if TYPE_CHECKING:
    import torch

    from manyhands.transports.base import Transport

MESSAGES = tuple(name for name, row in TRANSPORTS.items() if row.hosts)


def check(name: str, hosts: Sequence[str]) -> None:
    """Refuse a transport that cannot connect workers on these hosts. Needs no torch."""
    distinct = list(dict.fromkeys(hosts))
    if TRANSPORTS[name].one_rank and len(hosts) > 1:
        raise UsageError(
            f"transport {name} is for one worker, but there are {len(hosts)}: use shm, torch or mpi"
        )
    if TRANSPORTS[name].shared_memory and len(distinct) > 1:
        raise UsageError(
            f"transport {name} connects workers on one host, but there are {len(distinct)} hosts "
            f"({', '.join(distinct)}): use {' or '.join(MESSAGES)}"
        )


def connect(
    name: str, info: RankInfo, *, device: torch.device | None = None, timeout: float | None = None
) -> Transport:
    """The transport of one worker. All workers of the group must call it."""
    member = registry.member("transport", TRANSPORTS, name)
    check(name, info.hosts)
    from manyhands.transports.base import CPU, DEFAULT_TIMEOUT

    build = member
    on_gpus = device is not None and device.type != "cpu"  # there the workers of a host share no memory
    if name in MESSAGES and not on_gpus and 1 < len(rank_grid.rows(info.hosts)) < info.size:
        from manyhands.transports.hosts import HostsTransport

        build = partial(HostsTransport, between=member)
    transport: Transport = build(
        info, device=device or CPU, timeout=DEFAULT_TIMEOUT if timeout is None else timeout
    )
    return transport
