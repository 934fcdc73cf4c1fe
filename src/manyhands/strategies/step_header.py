"""The small values that travel with every step's gradients: loss, votes, which gradients exist, buffers.

Each worker writes one vector, and all workers read the sum over all workers:

    [ loss | stop over save skip | lacking | weight | had a gradient, one flag each | changes of buffers ]

The weight is what the loss and the gradients are divided by, where the loss is not a mean over samples; else
it is zero.

A buffer (a norm's running mean) changes at each worker according to its own samples. All workers apply the
mean of the changes, weighted by samples, so buffers stay equal everywhere and rounding never touches a
constant one. Buffers that are not floating-point (a norm's count of batches) stay each worker's own; the
ones of rank 0 are saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from manyhands.strategies.base import Outcome, Votes

_FLAGS = 7  # the first of them


class StepHeader:
    """Writes one worker's vector and reads the sum."""

    def __init__(self, model: nn.Module, parameters: int, own: Sequence[bool] | None = None) -> None:
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._before = [buffer.clone() for buffer in self._buffers]
        self._parameters = parameters
        self._own_parameters = [True] * parameters if own is None else list(own)  # which can have a gradient
        self.length = _FLAGS + parameters + sum(buffer.numel() for buffer in self._buffers)
        self.dtype = self._choose(model)
        self.weight = 0.0  # of the global batch, as last read

    @staticmethod
    def _choose(model: nn.Module) -> torch.dtype:
        dtypes = {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()}
        return torch.float32 if dtypes <= {torch.float32, torch.float16, torch.bfloat16} else torch.float64

    def bind(self, own: Tensor, summed: Tensor) -> None:
        """Set where this worker's vector lies, and where the sum of all vectors will lie."""
        self._own, self._summed = own, summed
        self._own_buffers, self._summed_buffers = self._split(own), self._split(summed)
        own[_FLAGS : _FLAGS + self._parameters] = torch.tensor(self._own_parameters).to(own)
        self._lacked = False
        # On the host the first few elements are written and read through numpy: a tensor of seven elements
        # costs as much as a small layer.
        self._head = own[:_FLAGS].numpy() if own.device.type == "cpu" else None
        self._summed_head = summed[:_FLAGS].numpy() if summed.device.type == "cpu" else None

    def write(
        self, loss: float, votes: Votes, touched: Sequence[bool], share: float, weight: float | None = None
    ) -> None:
        """Write this worker's vector; `share` is its part of the samples, `weight` its part of a weight."""
        lacking = not all(touched)
        head = (loss, *votes, lacking, weight or 0.0)
        if self._head is not None:
            self._head[:] = head
        else:
            self._own[:_FLAGS] = torch.tensor(head, dtype=self.dtype, device=self._own.device)
        if lacking or self._lacked:
            had = [own and has for own, has in zip(self._own_parameters, touched, strict=True)]
            flags = torch.tensor(had, dtype=self.dtype, device=self._own.device)
            self._own[_FLAGS : _FLAGS + self._parameters] = flags
            self._lacked = lacking
        if self._buffers:
            changes = torch._foreach_sub(self._buffers, self._before)
            torch._foreach_mul_(changes, share)
            torch._foreach_copy_(self._own_buffers, list(changes))

    def read(self) -> tuple[Outcome, list[int]]:
        """Return the outcome of the step, and the numbers of the parameters without a gradient anywhere."""
        head = self._summed_head if self._summed_head is not None else self._summed[:_FLAGS]
        loss, *votes, lacking, self.weight = head.tolist()
        if self.weight:
            loss /= self.weight
        missing: list[int] = []
        if lacking:
            flags = self._summed[_FLAGS : _FLAGS + self._parameters]
            missing = (flags == 0).nonzero().flatten().tolist()
        if self._buffers:
            pairs = zip(self._summed_buffers, self._before, strict=True)
            torch._foreach_add_(self._before, [part.to(own.dtype) for part, own in pairs])
            torch._foreach_copy_(self._buffers, self._before)
        return Outcome(loss, Votes(*(count > 0 for count in votes))), missing

    def rebase(self) -> None:
        """Accept buffers that were set from outside, to the same values at every worker."""
        if self._buffers:
            torch._foreach_copy_(self._before, self._buffers)

    def _split(self, vector: Tensor) -> list[Tensor]:
        """The parts of a vector that hold the changes of the buffers, each in its shape."""
        sizes = [buffer.numel() for buffer in self._buffers]
        parts = torch.split(vector[_FLAGS + self._parameters : self.length], sizes)
        return [part.view(buffer.shape) for part, buffer in zip(parts, self._buffers, strict=True)]
