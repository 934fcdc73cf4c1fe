"""The gradient noise scale without an extra backward pass: one micro-batch's gradient against the mean.

E|G_b|^2 = |G|^2 + tr(S)/b for the gradient of b samples (McCandlish et al. 2018), so the squared norms at two
batch sizes give both terms. Each worker's first micro-batch of a step is the small batch, the step the big
one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from manyhands.data.base import Batch
from manyhands.engine.compute_wrapper import ComputeWrapper
from manyhands.records.record import Noise
from manyhands.strategies.base import Compute, Norm
from manyhands.transports.base import Transport


class NoiseScaleMeter:
    """Sums of unbiased estimates of |G|^2 and tr(S), one per step; without --noise-scale it stays empty."""

    def __init__(self) -> None:
        self._gradient = self._spread = self._inverse = self._big = 0.0
        self._steps = 0
        self._before = (0.0, 0.0, 0)

    def add(self, small: float, inverse: float, big: float, total: int) -> None:
        """Add squared norms: the mean over small batches (mean 1/size `inverse`), and that of all `total`."""
        if inverse * total <= 1.0 + 1e-9:  # the ragged end of an epoch: no batch was smaller
            return
        if not (math.isfinite(small) and math.isfinite(big)):  # a run that diverges
            return
        spread = (small - big) / (inverse - 1 / total)
        self._spread += spread
        self._gradient += big - spread / total
        self._inverse += inverse
        self._big += total
        self._steps += 1

    def since(self) -> tuple[float, float] | None:
        """The means of both estimates since the last call; None if nothing was measured."""
        gradient, spread, steps = self._before
        self._before = (self._gradient, self._spread, self._steps)
        made = self._steps - steps
        return ((self._gradient - gradient) / made, (self._spread - spread) / made) if made else None

    @property
    def noise(self) -> Noise | None:
        """The means of this session."""
        if not self._steps:
            return None
        n = self._steps
        return Noise(
            small=n / self._inverse,
            big=self._big / n,
            gradient=self._gradient / n,
            spread=self._spread / n,
            steps=n,
        )


class MeteredCompute(ComputeWrapper):
    """A compute that measures gradients and changes nothing.

    Its hooks run before those of the strategy, which may move a gradient away at once.
    """

    def __init__(
        self, inner: Compute, model: nn.Module, transport: Transport, noise_meter: NoiseScaleMeter
    ) -> None:
        super().__init__(inner)
        self._transport, self._noise_meter = transport, noise_meter
        self._norms: list[Tensor] = []
        self._size, self._weight, self._total = 0, 0.0, 0.0
        self._counted: float | None = None
        # in this step: the small batch is running, has run, and the sum was measured
        self._small_runs = self._small_done = self._measured = False
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._measure_small)  # type: ignore[no-untyped-call]

    def forward(self, model: nn.Module, batch: Batch, weight: float) -> Tensor:
        """Note the first micro-batch of a step: it is the small batch."""
        first = not self._small_done and not self._small_runs
        if first:
            self._small_runs, self._size = True, batch.size
            self._total = batch.size / weight if weight else 0.0
        loss = self._inner.forward(model, batch, weight)
        counted = self._inner.take_weight()
        if counted is not None:
            self._counted = (self._counted or 0.0) + counted
        if first:  # what its gradient must be divided by to be the mean over the small batch
            self._weight = weight if counted is None else counted
        return loss

    def take_weight(self) -> float | None:
        counted, self._counted = self._counted, None
        return counted

    def backward(self, outputs: Sequence[Tensor] | Tensor, gradients: Sequence[Tensor] | None = None) -> None:
        """Measure the first backward pass of a step."""
        self._inner.backward(outputs, gradients)
        self._small_runs, self._small_done = False, True

    def clip(self, parameters: Iterable[Tensor], bound: float, norm: Norm = get_total_norm) -> None:
        """Measure before clipping."""
        held = list(parameters)
        self._measure(held)
        self._measured = True
        self._inner.clip(held, bound, norm)

    def update(self, optimizer: Optimizer, *, forget: bool = True, skip: bool = False) -> None:
        """Measure the sum of all gradients, or this worker's slice of it."""
        if not self._measured:
            self._measure(p for group in optimizer.param_groups for p in group["params"])
        self._small_done = self._measured = False
        self._norms.clear()
        self._inner.update(optimizer, forget=forget, skip=skip)

    def _measure_small(self, parameter: Tensor) -> None:
        if self._small_runs and parameter.grad is not None:
            self._norms.append(_square(parameter.grad))

    def _measure(self, parameters: Iterable[Tensor]) -> None:
        """Combine the values of all workers; on several hosts each slice is held once per host."""
        squares = [_square(parameter.grad) for parameter in parameters if parameter.grad is not None]
        own = torch.zeros(5, dtype=torch.float64)
        own[3] = torch.stack(squares).sum() if squares else 0.0
        if self._small_done and self._weight:  # a worker may have no sample of a short batch
            small = torch.stack(self._norms).sum() if self._norms else torch.zeros(())
            own[0] = small / self._weight**2
            own[1], own[2] = 1 / self._size, 1
            own[4] = self._total
        small, inverse, workers, big, total = self._transport.all_reduce(own).tolist()
        if workers:
            hosts = self._transport.across.size
            self._noise_meter.add(small / workers, inverse / workers, big / hosts, round(total / workers))


def _square(gradient: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    found: Tensor = torch.linalg.vector_norm(values.detach()).double().square()
    return found
