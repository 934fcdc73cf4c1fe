"""The memory of a process besides activations, and how fast activations can be moved."""

from __future__ import annotations

import time

import torch
from torch import nn

from manyhands.devices.device import HOST, Device
from manyhands.offload.activation_store import ActivationStore
from manyhands.offload.memory_plan import Speed

PROBE = 8 * 2**20  # bytes of a buffer that is moved to measure the speed
BUFFERS = 4
SPARE = 16 * 2**20  # bytes for what is not counted
STEPS = 4  # at the beginning; memory is not expected to grow later


def held(device: Device = HOST) -> int:
    """Bytes that this process uses now, in the memory of its device."""
    return device.held()


def most(device: Device = HOST) -> int:
    """The peak of these bytes."""
    return device.most()


def gradients_to_come(module: nn.Module) -> int:
    """Bytes of gradients that are not allocated yet."""
    return sum(p.nbytes for p in module.parameters() if p.requires_grad and p.grad is None)


class OtherMemory:
    """The memory of a worker besides activations: parameters, gradients, optimizer state, the program.

    Before the first step, the optimizer state is assumed to be as large as the parameters. Afterwards it is
    measured. If a step took more than the budget although the plan did not, the difference is added.
    """

    def __init__(self, budget: int | None, optimizer_state: int | None = None, device: Device = HOST) -> None:
        self._budget, self._optimizer_state, self._device = budget, optimizer_state, device
        self._measured = 0  # times
        self._most = self._over = self._held = 0

    @property
    def nbytes(self) -> int:
        """All of it in bytes, with some spare."""
        return self._held + self._over + SPARE

    def measure(self, module: nn.Module) -> None:
        """Measure it now, between two steps."""
        coming = gradients_to_come(module)
        optimizer = 0
        if not self._measured:
            parameters = sum(p.nbytes for p in module.parameters() if p.requires_grad)
            optimizer = parameters if self._optimizer_state is None else self._optimizer_state
        self._held = max(self._held, held(self._device) + coming + optimizer)
        if not self._measured:
            self._most = most(self._device)
        self._measured += 1

    def grown(self, module: nn.Module) -> bool:
        """Whether it has grown since the plan was made. Measured after each of the first few steps."""
        if self._budget is None or self._measured > STEPS:
            return False
        before, self._measured = self.nbytes, self._measured + 1
        self._held = max(self._held, held(self._device) + gradients_to_come(module))
        now = most(self._device)
        if now > max(self._most, self._budget):
            self._over += now - max(self._most, self._budget)
        self._most = max(now, self._most)
        return self.nbytes > before + SPARE // 4


def probe(store: ActivationStore) -> Speed:
    """Measure how fast a store moves buffers there and back, and how much it slows down computation."""
    matrix = torch.ones(256, 256, device=store.device)
    bare = _compute(matrix, 0.02)
    sources = [torch.ones(PROBE, dtype=torch.uint8, device=store.device) for _ in range(BUFFERS)]
    since = time.perf_counter()
    items = [store.send(source) for source in sources]
    del sources
    busy = _compute(matrix, 0.02)
    store.flush()
    write = time.perf_counter() - since
    since = time.perf_counter()
    for item in items:
        store.prefetch(item)
    for item in items:
        store.load(item)
    read = time.perf_counter() - since
    for item in items:
        store.drop(item)
    store.written = store.read = 0  # training has not begun
    store.waited = 0.0
    moved = PROBE * BUFFERS
    share = max(0.0, 1 - busy / bare)  # of computation that is lost meanwhile
    return Speed(moved / write, moved / read, share * (write + read) / moved)


def _compute(matrix: torch.Tensor, seconds: float) -> float:
    """Matrix products per second."""
    since, count = time.perf_counter(), 0
    while time.perf_counter() - since < seconds:
        matrix @ matrix
        count += 1
    return count / (time.perf_counter() - since)
