"""What a process holds and will hold beside activations, and how fast they could be moved."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

from manyhands.memory.plan import Speed
from manyhands.memory.store import Store

PROBE = 8 * 2**20  # bytes a parcel that is moved to see how long it takes
PARCELS = 4


def held() -> int:
    """Bytes that this process has in memory now, or has on its device."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.memory_reserved()
    table = Path("/proc/self/statm")
    if table.exists():
        return int(table.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    from manyhands.environment import peak_memory

    return peak_memory()


def to_come(module: nn.Module, copies: int = 1) -> int:
    """Bytes of gradients that are not there yet, and of what an optimiser remembers a parameter."""
    owing = 0
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            owing += parameter.nbytes * (1 + copies)
    return owing


def probe(store: Store) -> Speed:
    """Move something there and back while computing, and see how fast it is and what computing loses."""
    device = getattr(store, "_device", torch.device("cpu"))
    matrix = torch.ones(256, 256, device=device)
    bare = _compute(matrix, 0.02)
    sources = [torch.ones(PROBE, dtype=torch.uint8, device=device) for _ in range(PARCELS)]
    since = time.perf_counter()
    parcels = [store.send(source) for source in sources]
    del sources
    busy = _compute(matrix, 0.02)
    while store.written < PROBE * PARCELS:
        time.sleep(1e-3)
    write = time.perf_counter() - since
    since = time.perf_counter()
    for parcel in parcels:
        store.want(parcel)
    for parcel in parcels:
        store.take(parcel)
    read = time.perf_counter() - since
    for parcel in parcels:
        store.drop(parcel)
    moved = PROBE * PARCELS
    share = max(0.0, 1 - busy / bare)  # of computing that is lost meanwhile
    return Speed(moved / write, moved / read, share * (write + read) / moved)


def _compute(matrix: torch.Tensor, seconds: float) -> float:
    """Products a second."""
    since, count = time.perf_counter(), 0
    while time.perf_counter() - since < seconds:
        matrix @ matrix
        count += 1
    return count / (time.perf_counter() - since)
