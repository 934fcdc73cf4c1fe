"""One worker's rows of every parameter, and how they become whole tensors and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from manyhands.strategies.gather import gather_at_rank_0
from manyhands.transports.base import Transport


class Shards:
    """This worker's rows of every parameter, and how they become whole tensors and back.

    FSDP does not shard a scalar, an empty tensor or one of another dtype than the rest of its group: these
    are replicated at every worker, and rank 0 updates and broadcasts them.
    """

    def __init__(self, model: nn.Module, plain: nn.Module, transport: Transport) -> None:
        self._transport, self._plain = transport, dict(plain.named_parameters())
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._replicated: dict[str, Tensor] = {}
        self.local: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                self.local[name] = parameter.to_local().detach()
            else:
                self._replicated[name] = parameter.detach()
                self.local[name] = self.part(name, self._replicated[name])

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This worker's rows of a whole tensor, split as FSDP does: the last workers have fewer or none."""
        rank, size = self._transport.rank, self._transport.size
        parts = (whole,) if name in self._replicated else whole.chunk(size)
        return parts[rank] if rank < len(parts) else whole.new_empty((0, *whole.shape[1:]))

    def gathered(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors at rank 0, from all workers' rows; nothing at the others."""
        found = {name: self._gather(name, part) for name, part in parts.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def broadcast(self) -> None:
        """Copy what rank 0 has updated to all workers."""
        for name, tensor in self._replicated.items():
            if self._plain[name].requires_grad:
                self._transport.broadcast(tensor)

    def fill(self, *, rank_0_only: bool = False) -> None:
        """Fill the plain copy with whole tensors, at every worker or at rank 0 only."""
        for name, parameter in self._plain.items():
            whole = (self._gather if rank_0_only else self._all_gather)(name, self.local[name])
            if whole is not None:
                parameter.data = whole

    def empty(self) -> None:
        """Free the tensors of the plain copy."""
        for parameter in self._plain.values():
            parameter.data = parameter.data.new_empty(0)

    @torch.no_grad()
    def take(self) -> None:
        """Copy this worker's rows from the plain copy."""
        for name, parameter in self._plain.items():
            self.local[name].copy_(self.part(name, parameter))
            if name in self._replicated:
                self._replicated[name].copy_(parameter)

    def _gather(self, name: str, part: Tensor) -> Tensor | None:
        return gather_at_rank_0(
            self._transport, part, self._shapes[name], replicated=name in self._replicated
        )

    def _all_gather(self, name: str, part: Tensor) -> Tensor:
        rows = self._transport.all_gather(part)
        return torch.cat([row.flatten() for row in rows]).view(self._shapes[name])
