"""What one rank has and others need: tensors gathered at rank 0, and values of any structure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from manyhands.transports import tensor_bytes
from manyhands.transports.base import Collectives, Messages


def broadcast_json(transport: Collectives, value: Any, root: int = 0) -> Any:
    """The value of one rank, at all of them, in what JSON can write."""
    is_root = transport.rank == root
    text = torch.tensor(list(json.dumps(value if is_root else None).encode()), dtype=torch.uint8)
    length = transport.broadcast(torch.tensor([text.numel()]), root)
    text = text if is_root else torch.empty(int(length), dtype=torch.uint8)
    return json.loads(bytes(transport.broadcast(text, root).tolist()))


def named_at_rank_0(transport: Messages, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The named tensors of all ranks, at rank 0; nothing at the others. Shapes and types may be any."""
    if transport.rank:
        shapes = [
            [name, *tensor_bytes.header(tensor).tolist()[: 2 + tensor.dim()]] for name, tensor in own.items()
        ]
        text = torch.tensor(list(json.dumps(shapes).encode()), dtype=torch.uint8)
        transport.send(torch.tensor([text.numel()]), 0)
        transport.send(text, 0)
        for tensor in own.values():
            transport.send(tensor.detach(), 0)
        return {}
    found = {name: tensor.detach().clone() for name, tensor in own.items()}
    for source in range(1, transport.size):
        length = int(transport.recv(torch.zeros(1, dtype=torch.int64), source))
        text = transport.recv(torch.empty(length, dtype=torch.uint8), source)
        for name, *header in json.loads(bytes(text.tolist())):
            found[name] = transport.recv(tensor_bytes.allocate(header, torch.device("cpu")), source)
    return found


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
