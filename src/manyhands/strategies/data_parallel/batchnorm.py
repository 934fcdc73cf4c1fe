"""Batch norm over the global batch: `--sync-batchnorm`. By default each worker's statistics are its own.

torch's SyncBatchNorm runs on CUDA only and over its own process groups; this one runs on every transport. It
makes one exchange in forward (each worker's count, mean and sum of squared deviations, combined as by Chan,
Golub and LeVeque, which loses no digits) and one in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from manyhands.transports.base import Collectives


def synchronize(model: nn.Module, transport: Collectives) -> nn.Module:
    """The same model, with every batch norm in it computed over the samples of all workers."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(parent, name, _over_all(child, transport))
    return _over_all(model, transport) if isinstance(model, nn.modules.batchnorm._BatchNorm) else model


def _over_all(norm: nn.modules.batchnorm._BatchNorm, transport: Collectives) -> GlobalBatchNorm:
    made = GlobalBatchNorm(
        norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats
    ).train(norm.training)
    # the very same tensors under the same names: nothing else notices the replacement
    made._parameters, made._buffers = norm._parameters, norm._buffers
    made.transport = transport
    return made


class GlobalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A batch norm whose statistics are those of the global batch."""

    transport: Collectives

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize as batch norm does; while training, over all workers."""
        if not self.training and self.track_running_stats:
            return super().forward(input)
        self._check_input_dim(input)
        made: tuple[Tensor, Tensor, Tensor, Tensor] = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self.transport
        )
        output, mean, variance, count = made
        if self.training and self.track_running_stats:
            self._update_running(mean, variance, count)
        return output

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(variance * (count / (count - 1).clamp(min=1)), momentum)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, transport: Collectives
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        over = [0, *range(2, x.dim())]
        shape = [1, -1] + [1] * (x.dim() - 2)
        mean, count, squares = _statistics(x, over, shape, transport)
        variance = squares / count
        scale = (variance + eps).rsqrt()
        normal = (x - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, scale, weight, count)
        ctx.transport, ctx.over, ctx.shape, ctx.has_bias = transport, over, shape, bias is not None
        output = normal if weight is None else normal * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return output, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale, weight, count = ctx.saved_tensors
        of_bias = gradient.sum(ctx.over)
        of_weight = (gradient * normal).sum(ctx.over)
        sums = ctx.transport.all_reduce(torch.stack([of_bias, of_weight]))
        mean_gradient, mean_product = (sums / count).unbind()
        inner = gradient - mean_gradient.view(ctx.shape) - normal * mean_product.view(ctx.shape)
        factor = scale if weight is None else scale * weight
        of_input = inner * factor.view(ctx.shape)
        return (
            of_input,
            None if weight is None else of_weight,
            of_bias if ctx.has_bias else None,
            None,
            None,
        )


def _statistics(
    x: Tensor, over: list[int], shape: list[int], transport: Collectives
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, count and sum of squared deviations per channel, over all workers."""
    own_mean = x.mean(over)
    own_squares = (x - own_mean.view(shape)).square().sum(over)
    own_count = torch.full_like(own_mean, x.numel() / x.shape[1])
    gathered = torch.stack(transport.all_gather(torch.stack([own_count, own_mean, own_squares])))
    counts, means, squares = gathered.unbind(1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    between = (counts * (means - mean).square()).sum(0)
    return mean, count[:1], squares.sum(0) + between
