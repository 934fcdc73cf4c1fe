"""One server's slice of the parameters: updates are applied to it, and it is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

import torch
from torch import Tensor

from manyhands.recipes import optimizers
from manyhands.strategies import state
from manyhands.strategies.asynchronous.base import AsynchronousSetup
from manyhands.strategies.asynchronous.parameter_store import ParameterStore
from manyhands.strategies.asynchronous.server_channel import ServerChannel, ServerRequest, Verb
from manyhands.strategies.asynchronous.staleness import velocity_kept
from manyhands.strategies.flat_layout import ParameterSlot
from manyhands.strategies.options import ServerOptions


@final
class ParameterSlice:
    """A slice of the parameters with its optimizer state, and a version that counts its updates."""

    def __init__(self, setup: AsynchronousSetup, store: ParameterStore, channel: ServerChannel) -> None:
        self._transport, self._compute, self._model = setup.transport, setup.compute, setup.model
        self._options: ServerOptions = setup.options
        self._store, self._channel, self._rank = store, channel, setup.transport.rank
        # on one host all servers share one memory, which server 0 fills
        self._fills = self._rank == 0 or setup.transport.on_host.size < setup.transport.size
        if self._fills:
            store.fill(channel.values)
        setup.transport.barrier()
        store.bind(channel.values)
        self._part = store.slice_of(self._rank)
        self._whole = setup.recipe.scope != "elements"  # then there is one server, which has all parameters
        self._slices = {slot.name: self._of(slot, channel.values) for slot in store.slots}
        self._optimizer = optimizers.for_model(setup.recipe, setup.model, self._slices)
        self.version = 0
        self.count: Callable[[], None] = lambda: None  # called after each update

    def apply(self, row: Tensor, lr: float, staleness: int = 0) -> None:
        """Update the slice with a pushed gradient."""
        store, channel = self._store, self._channel
        divisor = max(1, staleness) if self._options.staleness_aware else 1
        flags = store.flags(row).tolist()
        for slot, had_gradient in zip(store.slots, flags, strict=True):
            self._slices[slot.name].grad = self._of(slot, row) if had_gradient else None
        optimizers.set_lr(self._optimizer, lr / divisor)
        with channel.change(), velocity_kept(self._optimizer, divisor):
            self._compute.update(self._optimizer, forget=False)
            if self._rank == 0 and store.buffer_elements:
                pairs = zip(store.buffers_in(channel.values), store.buffer_changes(row), strict=True)
                for buffer, change in pairs:
                    buffer.add_(change)
            self.version += 1
            channel.applied(self.version)
        self.count()

    def optimizer_state(self) -> list[Tensor]:
        """The kinds of optimizer state in the order of their names, each as a row of this slice."""
        rows: list[Tensor] = []
        for pieces in state.kinds(self._optimizer).values():
            flat = torch.zeros(self._store.length, dtype=self._store.dtype)
            self._store.write_pieces(self._rank, pieces, flat)
            rows.append(flat[self._part])
        return rows

    def whole_state(self) -> dict[str, Tensor]:
        """The parameters and the optimizer state, put together from all servers; server 0 calls this."""
        store, channel, others = self._store, self._channel, range(1, self._options.servers)
        if self._transport.on_host.size < self._transport.size:
            for other in others:
                reply = channel.ask(other, ServerRequest(Verb.PULL))
                channel.pull(other, channel.values, reply)
        store.load_buffers(channel.values)
        if self._whole:
            return state.pack(self._model, self._optimizer)
        numbers = iter(range(2**31))

        def consolidate(pieces: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            number, flat = next(numbers), torch.zeros(store.length, dtype=store.dtype)
            store.write_pieces(self._rank, pieces, flat)
            for other in others:
                flat[store.slice_of(other)] = channel.fetch(other, number)
            return store.whole_tensors(flat, pieces)

        return state.pack(self._model, self._optimizer, consolidate)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load this server's slices; server 0 loads the buffers too."""
        if self._fills:
            state.unpack_model(tensors, self._model)
            self._store.fill(self._channel.values)
        state.unpack_optimizer(tensors, self._optimizer, self._piece)
        self._transport.barrier()

    def _of(self, slot: ParameterSlot, flat: Tensor) -> Tensor:
        """What this server holds of a parameter, or of its gradient: a slice, or the whole in its shape."""
        return slot.view(flat) if self._whole else flat[slot.within(self._part)]

    def _piece(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if self._whole else self._store.piece(self._rank, name, tensor)
