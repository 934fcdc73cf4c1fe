"""The small things that travel with every step's gradients: loss, votes, which gradients there are, buffers.

One vector a worker, and the sum over all workers is what everybody reads:

    [ loss | stop over save | lacking | had a gradient, a number a parameter | changes of the buffers ]

A buffer (a norm's running mean) changes at each worker by what its own samples say. All take the mean of the
changes, weighted by samples, so buffers stay equal everywhere and a constant one is not touched by rounding.
Buffers that are no floating-point numbers (a norm's count of batches) stay each worker's own; what is saved
is rank 0's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from manyhands.strategies.base import Outcome, Votes

_LOSS, _VOTES, _LACKING, _FLAGS = 0, 1, 4, 5


class Notes:
    """Writes one worker's vector and reads the sum."""

    def __init__(self, model: nn.Module, parameters: int) -> None:
        self._buffers = [
            buffer for buffer in model.buffers() if buffer.is_floating_point() and buffer.numel()
        ]
        self._before = [buffer.clone() for buffer in self._buffers]
        self._parameters = parameters
        self._clean: set[int] = set()  # addresses of vectors whose flags all say yes
        self.length = _FLAGS + parameters + sum(buffer.numel() for buffer in self._buffers)
        self.dtype = self._choose(model)

    @staticmethod
    def _choose(model: nn.Module) -> torch.dtype:
        kinds = {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()}
        return torch.float32 if kinds <= {torch.float32, torch.float16, torch.bfloat16} else torch.float64

    def write(self, out: Tensor, loss: float, votes: Votes, touched: Sequence[bool], weight: float) -> None:
        """This worker's vector; `weight` is its part of the global batch."""
        lacking = not all(touched)
        head = [loss, votes.stop, votes.over, votes.save, lacking]
        out[:_FLAGS] = torch.tensor(head, dtype=self.dtype, device=out.device)
        if lacking or out.data_ptr() not in self._clean:
            flags = torch.tensor(list(touched), dtype=self.dtype, device=out.device)
            out[_FLAGS : _FLAGS + self._parameters] = flags
            (self._clean.discard if lacking else self._clean.add)(out.data_ptr())
        if self._buffers:
            changes = torch._foreach_sub(self._buffers, self._before)
            torch._foreach_mul_(changes, weight)
            torch._foreach_copy_(self._cut(out), list(changes))

    def read(self, summed: Tensor) -> tuple[Outcome, list[int]]:
        """What all know now, and the numbers of the parameters without a gradient anywhere."""
        loss, stop, over, save, lacking = summed[:_FLAGS].tolist()
        missing: list[int] = []
        if lacking:
            flags = summed[_FLAGS : _FLAGS + self._parameters]
            missing = (flags == 0).nonzero().flatten().tolist()
        if self._buffers:
            torch._foreach_add_(self._before, [part.to(own.dtype) for part, own in self._paired(summed)])
            torch._foreach_copy_(self._buffers, self._before)
        return Outcome(loss, Votes(stop > 0, over > 0, save > 0)), missing

    def rebase(self) -> None:
        """The buffers were set from outside, to the same values everywhere."""
        if self._buffers:
            torch._foreach_copy_(self._before, self._buffers)

    def _paired(self, vector: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._cut(vector), self._before, strict=True))

    def _cut(self, vector: Tensor) -> list[Tensor]:
        sizes = [buffer.numel() for buffer in self._buffers]
        parts = torch.split(vector[_FLAGS + self._parameters : self.length], sizes)
        return [part.view(buffer.shape) for part, buffer in zip(parts, self._buffers, strict=True)]
