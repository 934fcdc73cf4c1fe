"""What a parameter server holds: all parameters in one row of memory, cut into a slice a server.

                  slice of server 0        slice of server 1
    parameters  [ w w w w w w w w w w w | w w w w w w w w w w w ][ buffers ]
    a push      [ g g g g g g g g g g g | g g g g g g g g g g g ][ had a gradient | changes of the buffers ]

Buffers (a norm's running mean) change at each worker by what its own samples say; the changes travel with the
gradients, and server 0 adds them up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from manyhands.core.errors import ManyhandsError
from manyhands.strategies.consistency import trained
from manyhands.strategies.flat_layout import ALIGNED, ParameterSlot, aligned, laid, lay_out


@final
class ParameterStore:
    """The layout of a model, the same at every rank that has the model."""

    def __init__(self, model: nn.Module, servers: int) -> None:
        self.named = trained(model)
        kinds = {parameter.dtype for parameter in self.named.values()}
        if len(kinds) > 1:
            names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
            raise ManyhandsError(f"strategy server needs parameters of one type of number, found {names}")
        self.dtype = next(iter(kinds), torch.float32)
        self.spots, self.length = lay_out(self.named.items())
        self.buffers = [buffer for _, buffer in sorted(model.named_buffers())]
        self.kept = sum(buffer.numel() for buffer in self.buffers)  # numbers of the buffers
        self.whole = self.length + self.kept
        self.row = aligned(self.length + len(self.spots) + self.kept)
        self.borders = [index * (self.length // ALIGNED) // servers * ALIGNED for index in range(servers)] + [
            self.length
        ]

    def slice_of(self, server: int) -> slice:
        """The numbers that a server holds."""
        return slice(self.borders[server], self.borders[server + 1])

    def within(self, spot: ParameterSlot, server: int) -> tuple[int, int]:
        """A parameter's part of a server's slice, from and to; from = to where it has none."""
        low, high = self.borders[server], self.borders[server + 1]
        end = spot.start + spot.parameter.numel()
        first = min(max(low, spot.start), end)
        return first, max(first, min(high, end))

    def flags(self, row: Tensor) -> Tensor:
        """Which parameters had a gradient."""
        return row[self.length : self.length + len(self.spots)]

    def changes(self, row: Tensor) -> list[Tensor]:
        """Of the buffers, each in its shape."""
        start = self.length + len(self.spots)
        return self._cut(row[start : start + self.kept])

    def kept_in(self, whole: Tensor) -> list[Tensor]:
        """The buffers behind the parameters, each in its shape."""
        return self._cut(whole[self.length : self.whole])

    def fill(self, whole: Tensor) -> None:
        """The model's numbers into memory."""
        with torch.no_grad():
            for spot in self.spots:
                laid(whole, spot).copy_(spot.parameter)
            for place, buffer in zip(self.kept_in(whole), self.buffers, strict=True):
                place.copy_(buffer)

    def bind(self, flat: Tensor) -> None:
        """The model's parameters give up their own memory for this."""
        for spot in self.spots:
            spot.parameter.data = laid(flat, spot)

    def take_buffers(self, whole: Tensor) -> None:
        """The buffers' values from memory into the model."""
        for place, buffer in zip(self.kept_in(whole), self.buffers, strict=True):
            buffer.copy_(place.round() if not buffer.is_floating_point() else place)

    def part(self, server: int, name: str, tensor: Tensor) -> Tensor:
        """A server's part of a whole tensor, in the order in which the parameter lies in memory."""
        spot = next(spot for spot in self.spots if spot.name == name)
        low, high = self.within(spot, server)
        flat = torch.empty_like(spot.parameter, dtype=tensor.dtype, device="cpu").copy_(tensor)
        row = flat.as_strided((spot.parameter.numel(),), (1,))
        return row[low - spot.start : high - spot.start].detach().clone()

    def put_together(self, flat: Tensor, names: Mapping[str, object]) -> dict[str, Tensor]:
        """Whole tensors of the parameters' shapes from a row that holds them."""
        return {spot.name: laid(flat, spot).clone() for spot in self.spots if spot.name in names}

    def _cut(self, numbers: Tensor) -> list[Tensor]:
        parts = torch.split(numbers, [buffer.numel() for buffer in self.buffers])
        return [part.view(buffer.shape) for part, buffer in zip(parts, self.buffers, strict=True)]
