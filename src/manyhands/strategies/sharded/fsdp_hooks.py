"""FSDP's messages sent inside a transport's wrappers, so that they are counted, timed and can fail."""

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


def route_messages(unit: Any, transport: Transport) -> None:
    """Send this FSDP module's messages through the transport's wrappers, if this torch allows it."""
    if hasattr(unit, "set_custom_all_gather"):  # not in every version of torch
        unit.set_custom_all_gather(AllGatherHook(transport))
        unit.set_custom_reduce_scatter(ReduceScatterHook(transport))


class _Hook:
    """FSDP asks it for memory, and then to send."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGatherHook(_Hook):
    """All workers' rows to all workers; blocks until done."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        def gather(inner: object) -> list[Tensor]:
            _all_gather(output_tensor, input_tensor, group=group)
            return [output_tensor]

        inside(self._transport, "all_gather", output_tensor.nbytes, gather)


class ReduceScatterHook(_Hook):
    """The sum of all workers' gradients, to each worker its rows; blocks until done."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        def scatter(inner: object) -> None:
            _reduce_scatter(output_tensor, input_tensor, op=op, group=group)

        inside(self._transport, "reduce_scatter", input_tensor.nbytes, scatter)
