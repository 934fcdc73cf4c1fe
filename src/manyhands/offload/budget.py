"""What a process holds and will hold beside activations, and how fast they could be moved."""

from __future__ import annotations

import time

import torch
from torch import nn

from manyhands.devices.device import HOST, Device
from manyhands.offload.activation_store import ActivationStore
from manyhands.offload.memory_plan import Speed

PROBE = 8 * 2**20  # bytes a parcel that is moved to see how long it takes
PARCELS = 4
SPARE = 16 * 2**20  # bytes for what nobody counts
STEPS = 4  # at the beginning, after which nothing new is expected


def held(device: Device = HOST) -> int:
    """Bytes that this process has now, in the memory that its device computes in."""
    return device.held()


def most(device: Device = HOST) -> int:
    """The most bytes it has had there."""
    return device.most()


def gradients_to_come(module: nn.Module) -> int:
    """Bytes of gradients that are not there yet."""
    return sum(p.nbytes for p in module.parameters() if p.requires_grad and p.grad is None)


class Others:
    """What a worker holds beside activations: parameters, gradients, an optimizer's memory, the program.

    Before the first step an optimizer is taken to remember as much as the parameters are; afterwards it is
    seen. Where a step took more than the budget, though the plan said it would not, the difference is added.
    """

    def __init__(self, budget: int | None, remembered: int | None = None, device: Device = HOST) -> None:
        self._budget, self._remembered, self._device = budget, remembered, device
        self._looks = 0
        self._most = self._over = self._held = 0

    @property
    def nbytes(self) -> int:
        """With some room for what was forgotten."""
        return self._held + self._over + SPARE

    def look(self, module: nn.Module) -> None:
        """As it is now, between two steps."""
        coming = gradients_to_come(module)
        optimizer = 0
        if not self._looks:
            parameters = sum(p.nbytes for p in module.parameters() if p.requires_grad)
            optimizer = parameters if self._remembered is None else self._remembered
        self._held = max(self._held, held(self._device) + coming + optimizer)
        if not self._looks:
            self._most = most(self._device)
        self._looks += 1

    def grown(self, module: nn.Module) -> bool:
        """Whether there is more than when a plan was made; looked at after the first few steps."""
        if self._budget is None or self._looks > STEPS:
            return False
        before, self._looks = self.nbytes, self._looks + 1
        self._held = max(self._held, held(self._device) + gradients_to_come(module))
        now = most(self._device)
        if now > max(self._most, self._budget):
            self._over += now - max(self._most, self._budget)
        self._most = max(now, self._most)
        return self.nbytes > before + SPARE // 4


def probe(store: ActivationStore) -> Speed:
    """Move something there and back while computing, and see how fast it is and what computing loses."""
    matrix = torch.ones(256, 256, device=store.device)
    bare = _compute(matrix, 0.02)
    sources = [torch.ones(PROBE, dtype=torch.uint8, device=store.device) for _ in range(PARCELS)]
    since = time.perf_counter()
    parcels = [store.send(source) for source in sources]
    del sources
    busy = _compute(matrix, 0.02)
    store.settle()
    write = time.perf_counter() - since
    since = time.perf_counter()
    for parcel in parcels:
        store.want(parcel)
    for parcel in parcels:
        store.take(parcel)
    read = time.perf_counter() - since
    for parcel in parcels:
        store.drop(parcel)
    store.written = store.read = 0  # of training nothing yet
    store.waited = 0.0
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
