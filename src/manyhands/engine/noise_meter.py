"""Gradient noise without a further backward pass: one micro-batch's gradient beside the mean of all.

E|G_b|^2 = |G|^2 + tr(S)/b for the gradient of b samples (McCandlish et al. 2018), so the squared norms at two
sizes give both terms. Each worker's first micro-batch of a step is the smaller sample, the step the larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from manyhands.data.base import Batch
from manyhands.records.record import Noise
from manyhands.strategies.base import Compute, Norm
from manyhands.transports.base import Transport


class NoiseScaleMeter:
    """Sums of unbiased estimates of |G|^2 and tr(S), a step each; the null member is never told of any."""

    def __init__(self) -> None:
        self._gradient = self._spread = self._inverse = self._big = 0.0
        self._steps = 0
        self._before = (0.0, 0.0, 0)

    def add(self, small: float, inverse: float, big: float, total: int) -> None:
        """Squared norms: the mean over smaller samples, of mean 1/size `inverse`, and that of all `total`."""
        if inverse * total <= 1.0 + 1e-9:  # the ragged end of an epoch: nothing was smaller
            return
        if not (math.isfinite(small) and math.isfinite(big)):  # a run that diverges has no noise to speak of
            return
        spread = (small - big) / (inverse - 1 / total)
        self._spread += spread
        self._gradient += big - spread / total
        self._inverse += inverse
        self._big += total
        self._steps += 1

    def since(self) -> tuple[float, float] | None:
        """The means of both since this was asked before; none where nothing was measured."""
        gradient, spread, steps = self._before
        self._before = (self._gradient, self._spread, self._steps)
        made = self._steps - steps
        return ((self._gradient - gradient) / made, (self._spread - spread) / made) if made else None

    @property
    def noise(self) -> Noise | None:
        """The means of this sitting."""
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


class MeteredCompute(Compute):
    """A compute that looks at the gradients as they pass; nothing that is computed changes.

    Its hooks come before the strategy's, which may move a gradient away as soon as it is there.
    """

    def __init__(
        self, inner: Compute, model: nn.Module, transport: Transport, noise_meter: NoiseScaleMeter
    ) -> None:
        self._inner, self._transport, self._gauge = inner, transport, noise_meter
        self._norms: list[Tensor] = []
        self._size, self._weight = 0, 0.0
        self._looking = self._looked = self._measured = False  # in this step
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._caught)  # type: ignore[no-untyped-call]

    def forward(self, model: nn.Module, batch: Batch, weight: float) -> Tensor:
        """The first micro-batch of a step is the smaller sample."""
        if not self._looked and not self._looking:
            self._looking, self._size, self._weight = True, batch.size, weight
        return self._inner.forward(model, batch, weight)

    def through(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """The inner one's."""
        return self._inner.through(module, inputs)

    def backward(self, outputs: Tensor, gradient: Tensor | None = None) -> None:
        """Looked at the first time in a step."""
        self._inner.backward(outputs, gradient)
        self._looking, self._looked = False, True

    def clip(self, parameters: Iterable[Tensor], bound: float, norm: Norm = get_total_norm) -> None:
        """What is clipped is measured before."""
        held = list(parameters)
        self._measure(held)
        self._measured = True
        self._inner.clip(held, bound, norm)

    def update(self, optimizer: Optimizer, *, forget: bool = True) -> None:
        """The sum of all gradients is there, or this worker's slice of it."""
        if not self._measured:
            self._measure(p for group in optimizer.param_groups for p in group["params"])
        self._looked = self._measured = False
        self._norms.clear()
        self._inner.update(optimizer, forget=forget)

    def _caught(self, parameter: Tensor) -> None:
        if self._looking and parameter.grad is not None:
            self._norms.append(_square(parameter.grad))

    def _measure(self, parameters: Iterable[Tensor]) -> None:
        """Put every worker's numbers together; on several hosts each slice is held once a host."""
        squares = [_square(parameter.grad) for parameter in parameters if parameter.grad is not None]
        mine = torch.zeros(5, dtype=torch.float64)
        mine[3] = torch.stack(squares).sum() if squares else 0.0
        if self._looked:  # a worker may have had no sample of a short batch
            small = torch.stack(self._norms).sum() if self._norms else torch.zeros(())
            mine[0] = small / self._weight**2
            mine[1], mine[2] = 1 / self._size, 1
            mine[4] = self._size / self._weight
        small, inverse, workers, big, total = self._transport.all_reduce(mine).tolist()
        if workers:
            hosts = self._transport.across.size
            self._gauge.add(small / workers, inverse / workers, big / hosts, round(total / workers))


def _square(gradient: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    found: Tensor = torch.linalg.vector_norm(values.detach()).double().square()
    return found
