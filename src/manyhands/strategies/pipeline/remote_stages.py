"""Stages that share no memory: each worker holds what it needs of its stage, and only messages join them.

Every worker has room for all parameters, but only its own stage's are up to date there, have gradients and an
optimizer's memory. Replicas of a stage sum their gradients by an all-reduce of their own:

    replica 0   [ stage 0 | worker 0 ]   [ stage 1 | worker 1 ]
    replica 1   [ stage 0 | worker 2 ]   [ stage 1 | worker 3 ]
    replica 2   [ stage 0 | worker 4 ]   [ stage 1 | worker 5 ]
                  `-- all-reduce --'       `-- all-reduce --'

The whole model is put together for evaluations and checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.strategies import state
from manyhands.strategies.step_header import StepHeader
from manyhands.transports import tensor_bytes
from manyhands.transports.base import Transport


@final
class RemoteStages:
    """One worker's stage, its replicas elsewhere, and the other stages elsewhere."""

    def __init__(
        self,
        model: nn.Module,
        transport: Transport,
        named: Mapping[str, nn.Parameter],
        stages: int,
        own: set[str],
    ) -> None:
        self._transport, self._stages = transport.messages, stages
        self._replicas = transport.size // stages
        alike = [tuple(range(stage, transport.size, stages)) for stage in range(stages)]
        self._peers = self._transport.split(alike) if self._replicas > 1 else None
        self._own = own
        self._names = list(named)
        self._held: dict[str, Tensor] = {name: p for name, p in named.items() if name in own}
        # an optimizer wants something to update also where a stage has nothing: it never has a gradient
        nothing = {"nothing": torch.empty(0)} if named else {}
        self.slices: dict[str, Tensor] = self._held or nothing
        mine = [name in own for name in named]
        self.notes = StepHeader(model, len(named), mine)
        device = next((p.device for p in named.values()), torch.device("cpu"))
        self._noted = torch.zeros(self.notes.length, dtype=self.notes.dtype, device=device)
        self._summed = torch.zeros_like(self._noted)
        self.notes.bind(self._noted, self._summed)

    def begin(self) -> None:
        """Autograd adds to `.grad`: away with the last step's."""
        for parameter in self._held.values():
            parameter.grad = None

    @property
    def touched(self) -> list[bool]:
        """Which parameters have a gradient; those of other stages are not missing here."""
        return [name not in self._own or self._held[name].grad is not None for name in self._names]

    def reduce(self) -> None:
        """Sum this stage's gradients over its replicas, and everybody's notes."""
        if self._peers is not None:
            for parameter in self._held.values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            _sum(self._peers, [p.grad for p in self._held.values() if p.grad is not None])
        self._summed.copy_(self._noted)
        self._transport.all_reduce(self._summed)

    def leave_out(self, missing: list[int]) -> None:
        """As in one process."""
        for number in missing:
            if (name := self._names[number]) in self._held:
                self._held[name].grad = None

    def publish(self) -> None:
        """Nobody else reads this stage."""

    def norms(self, slices: list[Tensor]) -> Tensor:
        """This stage's tensors are whole here."""
        return torch.stack([torch.linalg.vector_norm(tensor) for tensor in slices])

    def norm(self, slices: list[Tensor]) -> Tensor:
        """Over all stages; every replica of a stage brings the same."""
        square = sum((tensor.square().sum() for tensor in slices), torch.zeros((), device=self._noted.device))
        whole = torch.as_tensor(square, dtype=self._noted.dtype).reshape(1)
        return (self._transport.all_reduce(whole) / self._replicas).sqrt_().reshape(())

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        """Each stage's parameters from its first replica; buffers are equal everywhere already."""
        own = {name: p.detach() for name, p in model.named_parameters() if name in self._own}
        found = self._everybodys(own)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in found:
                    parameter.copy_(found[name])
        yield

    def collect(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        """Every stage's part of the optimizer's memory beside the whole model."""
        with self.whole(model):
            packed = state.pack(model, optimizer)
        whole = {name: tensor for name, tensor in packed.items() if name.startswith("model/")}
        memory = {name: tensor for name, tensor in packed.items() if name.startswith("optimizer/")}
        own = {name: tensor for name, tensor in memory.items() if name.split("/", 2)[-1] in self._own}
        return {**whole, **self._everybodys(own)}

    def restore(self, tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
        """The whole model, and the optimizer's memory of this stage."""
        state.unpack(tensors, model, optimizer)

    def _everybodys(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the first replica of every stage, at all workers."""
        found: dict[str, Tensor] = {}
        for root in range(self._stages):
            mine = self._transport.rank == root
            heads = [(name, list(tensor_bytes.header(tensor).tolist())) for name, tensor in own.items()]
            text = torch.tensor(list(json.dumps(heads if mine else []).encode()), dtype=torch.uint8)
            length = self._transport.broadcast(torch.tensor([text.numel()]), root)
            text = text if mine else torch.empty(int(length), dtype=torch.uint8)
            self._transport.broadcast(text, root)
            for name, head in json.loads(bytes(text.tolist())):
                tensor = own[name].clone() if mine else tensor_bytes.allocate(head, self._noted.device)
                found[name] = self._transport.broadcast(tensor, root)
        return found


def _sum(transport: Transport, gradients: list[Tensor]) -> None:
    """In place, with the same bits at every replica; as one message for each type of number."""
    for kind in dict.fromkeys(gradient.dtype for gradient in gradients):
        alike = [gradient for gradient in gradients if gradient.dtype == kind]
        message = torch.cat([gradient.reshape(-1) for gradient in alike])
        transport.all_reduce(message)
        parts = torch.split(message, [gradient.numel() for gradient in alike])
        for gradient, part in zip(alike, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))
