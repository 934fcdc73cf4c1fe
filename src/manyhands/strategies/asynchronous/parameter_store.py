"""The layout of what parameter servers hold: all parameters in one row of memory, one slice per server.

                  slice of server 0        slice of server 1
    parameters  [ w w w w w w w w w w w | w w w w w w w w w w w ][ buffers ]
    a push      [ g g g g g g g g g g g | g g g g g g g g g g g ][ had a gradient | changes of the buffers ]

Buffers (a norm's running mean) change at each worker according to its own samples. The changes travel with
the gradients, and server 0 adds them up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from manyhands.core.errors import ManyhandsError
from manyhands.strategies.consistency import trained_parameters
from manyhands.strategies.flat_layout import aligned, lay_out, slice_of


@final
class ParameterStore:
    """The layout of a model, equal at every rank that has the model."""

    def __init__(self, model: nn.Module, servers: int) -> None:
        self.named = trained_parameters(model)
        dtypes = {parameter.dtype for parameter in self.named.values()}
        if len(dtypes) > 1:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise ManyhandsError(f"strategy server needs parameters of one dtype, found {names}")
        self.dtype = next(iter(dtypes), torch.float32)
        self.servers = servers
        self.slots, self.length = lay_out(self.named.items())
        self.buffers = [buffer for _, buffer in sorted(model.named_buffers())]
        self.buffer_elements = sum(buffer.numel() for buffer in self.buffers)
        self.size = self.length + self.buffer_elements  # elements of parameters and buffers
        self.row = aligned(self.length + len(self.slots) + self.buffer_elements)  # elements of a push

    def slice_of(self, server: int) -> slice:
        """The elements of the parameters that a server holds."""
        return slice_of(self.length, server, self.servers)

    def flags(self, row: Tensor) -> Tensor:
        """The part of a push that says which parameters had a gradient."""
        return row[self.length : self.length + len(self.slots)]

    def buffer_changes(self, row: Tensor) -> list[Tensor]:
        """The part of a push that holds the changes of the buffers, each in its shape."""
        start = self.length + len(self.slots)
        return self._split_buffers(row[start : start + self.buffer_elements])

    def buffers_in(self, values: Tensor) -> list[Tensor]:
        """The buffers behind the parameters, each in its shape."""
        return self._split_buffers(values[self.length : self.size])

    def fill(self, values: Tensor) -> None:
        """Copy the model's parameters and buffers into memory."""
        with torch.no_grad():
            for slot in self.slots:
                slot.view(values).copy_(slot.parameter)
            for target, buffer in zip(self.buffers_in(values), self.buffers, strict=True):
                target.copy_(buffer)

    def bind(self, values: Tensor) -> None:
        """Let the model's parameters live in this memory."""
        for slot in self.slots:
            slot.parameter.data = slot.view(values)

    def load_buffers(self, values: Tensor) -> None:
        """Copy the buffers from memory into the model."""
        for source, buffer in zip(self.buffers_in(values), self.buffers, strict=True):
            buffer.copy_(source.round() if not buffer.is_floating_point() else source)

    def piece(self, server: int, name: str, tensor: Tensor) -> Tensor:
        """A server's piece of a whole tensor, in the order in which the parameter lies in memory."""
        slot = next(slot for slot in self.slots if slot.name == name)
        return slot.piece(self.slice_of(server), tensor)

    def write_pieces(self, server: int, pieces: Mapping[str, Tensor], flat: Tensor) -> None:
        """Copy a server's pieces of named tensors to their slots in flat memory."""
        part = self.slice_of(server)
        for slot in self.slots:
            if slot.name in pieces:
                flat[slot.within(part)] = pieces[slot.name]

    def whole_tensors(self, flat: Tensor, names: Mapping[str, object]) -> dict[str, Tensor]:
        """Copies of named tensors, in the shapes of their parameters, from flat memory that holds them."""
        return {slot.name: slot.view(flat).clone() for slot in self.slots if slot.name in names}

    def _split_buffers(self, elements: Tensor) -> list[Tensor]:
        parts = torch.split(elements, [buffer.numel() for buffer in self.buffers])
        return [part.view(buffer.shape) for part, buffer in zip(parts, self.buffers, strict=True)]
