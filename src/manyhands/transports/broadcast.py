"""Named tensors from rank 0 to all the others, in pieces of bounded size; all ranks take part together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from manyhands.transports import tensor_bytes
from manyhands.transports.base import Transport

PIECE = 4 << 20  # bytes: small tensors share one, large ones take several


def broadcast_tensors(
    transport: Transport, tensors: Mapping[str, Tensor] | None, words: str = ""
) -> tuple[dict[str, Tensor], str]:
    """Rank 0's tensors and words, at every rank; what the others bring is not looked at."""
    if transport.rank == 0:
        assert tensors is not None
        made = {name: tensor_bytes.row(tensor).view(tensor.shape) for name, tensor in tensors.items()}
        heads = [[name, tensor_bytes.code(t.dtype), list(t.shape)] for name, t in made.items()]
        _told(transport, json.dumps([heads, words]).encode())
    else:
        heads, words = json.loads(_told(transport, b""))
        made = {name: torch.empty(shape, dtype=tensor_bytes.dtype(code)) for name, code, shape in heads}
    _cast(
        transport,
        [tensor_bytes.as_bytes(tensor_bytes.row(tensor)) for tensor in made.values() if tensor.numel()],
    )
    return made, words


def _told(transport: Transport, text: bytes) -> bytes:
    """Rank 0's bytes, whose number the others do not know."""
    length = torch.tensor([len(text)])
    row = torch.empty(int(transport.broadcast(length)), dtype=torch.uint8)
    if transport.rank == 0:
        row.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    _cast(transport, [row])
    return row.numpy().tobytes()


def _cast(transport: Transport, rows: Sequence[Tensor]) -> None:
    """Rank 0's bytes into everybody's rows, which are as long."""
    room = torch.empty(min(PIECE, sum(row.numel() for row in rows)), dtype=torch.uint8)
    for cuts in _pieces([row.numel() for row in rows], PIECE):
        parts = [rows[number][begin:end] for number, begin, end in cuts]
        piece = room[: sum(part.numel() for part in parts)]
        if transport.rank == 0:
            torch.cat(parts, out=piece)
        transport.broadcast(piece)
        if transport.rank:
            for part, got in zip(parts, torch.split(piece, [part.numel() for part in parts]), strict=True):
                part.copy_(got)


def _pieces(lengths: Sequence[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut rows, one after the other, into pieces of at most so many bytes: (row, from, to) each."""
    piece: list[tuple[int, int, int]] = []
    free = most
    for number, length in enumerate(lengths):
        begin = 0
        while begin < length:
            end = min(length, begin + free)
            piece.append((number, begin, end))
            free -= end - begin
            begin = end
            if not free:
                yield piece
                piece, free = [], most
    if piece:
        yield piece
