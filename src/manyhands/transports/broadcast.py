"""Broadcast named tensors from rank 0 in pieces of bounded size. All ranks must take part."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from manyhands.transports import tensor_bytes
from manyhands.transports.base import Collectives

PIECE = 4 << 20  # bytes: small tensors share a piece, large ones take several


def broadcast_tensors(
    transport: Collectives, tensors: Mapping[str, Tensor] | None, text: str = ""
) -> tuple[dict[str, Tensor], str]:
    """Rank 0's tensors and text, at every rank. The arguments of other ranks are ignored."""
    if transport.rank == 0:
        assert tensors is not None
        made = {name: tensor_bytes.flatten(tensor).view(tensor.shape) for name, tensor in tensors.items()}
        headers = [[name, tensor_bytes.code(t.dtype), list(t.shape)] for name, t in made.items()]
        _broadcast_bytes(transport, json.dumps([headers, text]).encode())
    else:
        headers, text = json.loads(_broadcast_bytes(transport, b""))
        made = {name: torch.empty(shape, dtype=tensor_bytes.dtype(code)) for name, code, shape in headers}
    _broadcast_rows(
        transport,
        [tensor_bytes.as_bytes(tensor_bytes.flatten(tensor)) for tensor in made.values() if tensor.numel()],
    )
    return made, text


def _broadcast_bytes(transport: Collectives, content: bytes) -> bytes:
    """Rank 0's bytes, of a length that the other ranks do not know."""
    length = torch.tensor([len(content)])
    row = torch.empty(int(transport.broadcast(length)), dtype=torch.uint8)
    if transport.rank == 0:
        row.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    _broadcast_rows(transport, [row])
    return row.numpy().tobytes()


def _broadcast_rows(transport: Collectives, rows: Sequence[Tensor]) -> None:
    """Copy rank 0's rows of bytes into the rows of all ranks, which have the same lengths."""
    buffer = torch.empty(min(PIECE, sum(row.numel() for row in rows)), dtype=torch.uint8)
    for ranges in _pieces([row.numel() for row in rows], PIECE):
        parts = [rows[number][begin:end] for number, begin, end in ranges]
        piece = buffer[: sum(part.numel() for part in parts)]
        if transport.rank == 0:
            torch.cat(parts, out=piece)
        transport.broadcast(piece)
        if transport.rank:
            for part, got in zip(parts, torch.split(piece, [part.numel() for part in parts]), strict=True):
                part.copy_(got)


def _pieces(lengths: Sequence[int], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """Divide rows into pieces of at most `limit` bytes. A piece is a list of (row, begin, end)."""
    piece: list[tuple[int, int, int]] = []
    left = limit
    for number, length in enumerate(lengths):
        begin = 0
        while begin < length:
            end = min(length, begin + left)
            piece.append((number, begin, end))
            left -= end - begin
            begin = end
            if not left:
                yield piece
                piece, left = [], limit
    if piece:
        yield piece
