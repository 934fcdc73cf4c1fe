"""What is timed at every rank: all-reduces of all sizes, the arena's reduction, and plain copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from manyhands.core.rank_info import RankInfo
from manyhands.transports.connect import connect

SIZES = [4 * 2**10, 32 * 2**10, 256 * 2**10, 2 * 2**20, 16 * 2**20, 64 * 2**20]  # bytes


def timed(call: Callable[[], object], nbytes: int) -> float:
    """Seconds of one call: the median of as many as a third of a second or so allows."""
    times = []
    for _ in range(max(7, min(300, 2**27 // nbytes))):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def all_reduces(info: RankInfo, name: str) -> list[float]:
    """At every rank: one transport, all sizes."""
    torch.set_num_threads(1)
    transport = connect(name, info)
    found = []
    for nbytes in SIZES:
        tensor = torch.zeros(nbytes // 4)
        transport.barrier()
        found.append(timed(lambda tensor=tensor: transport.all_reduce(tensor), nbytes))  # type: ignore[misc]
    transport.close()
    return found


def arena_reduces(info: RankInfo, name: str) -> list[float]:
    """At every rank: what a step of the arena costs beyond computing."""
    torch.set_num_threads(1)
    transport = connect("shm", info)
    found = []
    for nbytes in SIZES:
        count = nbytes // 4
        rows = (
            transport.share(f"rows-{nbytes}", nbytes * info.size).view(torch.float32).view(info.size, count)
        )
        rows[info.rank].fill_(1.0)
        low, high = (index * count // info.size for index in (info.rank, info.rank + 1))
        parts, out = [row[low:high] for row in rows], torch.empty(high - low)

        def reduce(parts: list[torch.Tensor] = parts, out: torch.Tensor = out) -> None:
            transport.barrier()
            transport.add_shared(parts, out)
            transport.barrier()

        reduce()
        found.append(timed(reduce, nbytes))
    transport.close()
    return found


def copies(info: RankInfo, name: str) -> list[float]:
    """One process alone: a plain copy."""
    torch.set_num_threads(1)
    found = []
    for nbytes in SIZES:
        source, target = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
        found.append(timed(lambda source=source, target=target: target.copy_(source), nbytes))  # type: ignore[misc]
    return found
