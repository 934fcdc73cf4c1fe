"""FSDP's messages sent inside a transport's wrappers, so that they are counted, timed and made to fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.transports.base import Transport, inside

# torch 2.13 gave them other names
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def pass_through(unit: Any, transport: Transport) -> None:
    """Let this FSDP module's messages be seen, where torch lets us."""
    if hasattr(unit, "set_custom_all_gather"):  # not in every torch
        unit.set_custom_all_gather(Gather(transport))
        unit.set_custom_reduce_scatter(Scatter(transport))


class _Message:
    """What FSDP asks for room, and then to send."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room of its own."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Message):
    """Everybody's rows to everybody."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Done when it returns."""

        def gather(inner: object) -> list[Tensor]:
            _all_gather(output_tensor, input_tensor, group=group)
            return [output_tensor]

        inside(self._transport, "all_gather", output_tensor.nbytes, gather)


class Scatter(_Message):
    """Everybody's gradients summed, to each worker its rows of the sum."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Done when it returns."""

        def scatter(inner: object) -> None:
            _reduce_scatter(output_tensor, input_tensor, op=op, group=group)

        inside(self._transport, "reduce_scatter", input_tensor.nbytes, scatter)
