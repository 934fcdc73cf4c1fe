"""A tensor of which every worker holds some rows, gathered at rank 0; the others keep nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.transports.base import Messages


def gather_at_rank_0(
    transport: Messages, rows: Tensor, shape: torch.Size, *, replicated: bool = False
) -> Tensor | None:
    """The whole tensor at rank 0, each worker's rows received in place; None at the others.

    Rows are split as FSDP splits them. A `replicated` tensor is not split, and rank 0 has all of it.
    """
    if transport.rank:
        if not replicated and rows.numel():
            transport.send(rows, 0)
        return None
    if replicated:
        return rows.detach().clone().view(shape)
    whole = rows.new_empty(shape)
    for source, part in enumerate(whole.chunk(transport.size)):
        if source == 0:
            part.copy_(rows)
        elif part.numel():
            transport.recv(part, source)
    return whole
