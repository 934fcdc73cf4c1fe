"""A tensor of which every worker holds some rows, put together at rank 0: the others keep nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.transports.base import Messages


def at_first(transport: Messages, rows: Tensor, shape: torch.Size, *, shared: bool = False) -> Tensor | None:
    """The whole at rank 0, each worker's rows received where they belong; None at the others.

    They are cut as FSDP does; what is `shared` is not cut, and rank 0 has all of it.
    """
    if transport.rank:
        if not shared and rows.numel():
            transport.send(rows, 0)
        return None
    if shared:
        return rows.detach().clone().view(shape)
    whole = rows.new_empty(shape)
    for source, part in enumerate(whole.chunk(transport.size)):
        if source == 0:
            part.copy_(rows)
        elif part.numel():
            transport.recv(part, source)
    return whole
