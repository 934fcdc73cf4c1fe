"""LARS and LAMB: the step of each layer is scaled by the norm of its weights.

Both take `norms`, the only function that needs whole layers. If a worker holds slices of the layers, its
strategy passes a function that sums the squares over all workers. It is called once per step and layerwise
group, with the same number of tensors at every worker. So a worker without a part of a layer must hold an
empty slice of it. Groups marked `layerwise=False` (biases, normalization) take plain steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Norms = Callable[[list[Tensor]], Tensor]
Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


def local_norms(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norms of tensors that this worker holds whole."""
    return torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors])


class _Layerwise(Optimizer):
    """Evaluates the closure and calls `_update` with the tensors of each group that have gradients."""

    def __init__(self, params: Parameters, defaults: dict[str, Any], norms: Norms) -> None:
        super().__init__(params, {**defaults, "layerwise": True})
        self._norms = norms

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step with the current gradients. Tensors without a gradient are skipped."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._update(group, weights, [weight.grad for weight in weights])
        return loss

    def _update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        raise NotImplementedError

    def _buffers(self, weights: list[Tensor], key: str) -> list[Tensor]:
        states = [self.state[weight] for weight in weights]
        for weight, state in zip(weights, states, strict=True):
            if key not in state:
                state[key] = torch.zeros_like(weight)
        return [state[key] for state in states]

    def _paired_norms(self, weights: list[Tensor], others: list[Tensor]) -> tuple[Tensor, Tensor]:
        # one call for both: it may need communication
        of_weights, of_others = self._norms([*weights, *others]).chunk(2)
        return of_weights, of_others


class Lars(_Layerwise):
    """You, Gitman and Ginsburg 2017: `v <- momentum v + trust (g + decay w)`, `w <- w - lr v`.

    The learning rate is not part of v. Goyal et al. show that a v that includes it must be corrected by
    new lr / old lr whenever it changes. Here there is nothing to correct.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        coefficient: float = 0.001,
        epsilon: float = 1e-9,
        norms: Norms = local_norms,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "coefficient": coefficient, "epsilon": epsilon}, norms)

    def _update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        trust = self._trust(group, weights, gradients).unbind()
        velocities = self._buffers(weights, "momentum_buffer")
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_addcmul_(velocities, gradients, trust)
        if group["weight_decay"]:
            torch._foreach_addcmul_(velocities, weights, trust, value=group["weight_decay"])
        torch._foreach_add_(weights, velocities, alpha=-group["lr"])

    def _trust(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> Tensor:
        if not group["layerwise"]:
            return weights[0].new_ones(len(weights))
        weight, gradient = self._paired_norms(weights, gradients)
        ratio = group["coefficient"] * weight
        ratio = ratio / (gradient + group["weight_decay"] * weight + group["epsilon"])
        # a layer that starts at zero must be able to change
        return torch.where((weight > 0) & (gradient > 0), ratio, 1.0)


class Lamb(_Layerwise):
    """You et al. 2019: Adam's bias-corrected direction plus decay, scaled to the norm of the layer's weights.

    `clamp` bounds that norm from above: the paper's phi, whose lower bound is 0.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        clamp: float | None = None,
        epsilon: float = 1e-6,
        norms: Norms = local_norms,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "clamp": clamp, "epsilon": epsilon}, norms)

    def _update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        updates = self._direction(group, weights, gradients)
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        if group["layerwise"]:
            torch._foreach_mul_(updates, self._trust(group, weights, updates).unbind())
        torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _direction(
        self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]
    ) -> list[Tensor]:
        beta1, beta2 = group["betas"]
        means, squares = self._buffers(weights, "exp_avg"), self._buffers(weights, "exp_avg_sq")
        steps = self._count(weights)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        # m / (1 - beta1^t) over sqrt(v / (1 - beta2^t)) + epsilon
        spreads = torch._foreach_sqrt(squares)
        torch._foreach_div_(spreads, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(spreads, group["epsilon"])
        torch._foreach_mul_(spreads, [1 - beta1**step for step in steps])
        return list(torch._foreach_div(means, spreads))

    def _count(self, weights: list[Tensor]) -> list[float]:
        # counted per tensor, because some may have no gradient at times; on the CPU, so that reading it does
        # not wait for a device
        counters = [
            self.state[weight].setdefault("step", torch.zeros((), dtype=torch.float32)) for weight in weights
        ]
        return [counter.add_(1).item() for counter in counters]

    def _trust(self, group: dict[str, Any], weights: list[Tensor], updates: list[Tensor]) -> Tensor:
        weight, update = self._paired_norms(weights, updates)
        bounded = weight if group["clamp"] is None else weight.clamp(max=group["clamp"])
        return torch.where((weight > 0) & (update > 0), bounded / update, 1.0)
