"""Stages that share no memory: each worker trains its own stage and sends messages to the others.

Every worker has memory for all parameters, but only those of its own stage are up to date and have gradients
and optimizer state. The replicas of a stage sum their gradients by an all-reduce of their own:

    replica 0   [ stage 0 | worker 0 ]   [ stage 1 | worker 1 ]
    replica 1   [ stage 0 | worker 2 ]   [ stage 1 | worker 3 ]
    replica 2   [ stage 0 | worker 4 ]   [ stage 1 | worker 5 ]
                  `-- all-reduce --'       `-- all-reduce --'

The whole model is consolidated for evaluations and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.strategies import state
from manyhands.strategies.base import gradients_of
from manyhands.strategies.gather import broadcast_json
from manyhands.strategies.step_header import StepHeader
from manyhands.transports import tensor_bytes
from manyhands.transports.base import Transport


@final
class RemoteStages:
    """One worker's stage; its replicas and the other stages are on other workers."""

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
        groups = [tuple(range(stage, transport.size, stages)) for stage in range(stages)]
        self._peers = self._transport.split(groups) if self._replicas > 1 else None
        self._own = own
        self._names = list(named)
        self._own_parameters: dict[str, Tensor] = {name: p for name, p in named.items() if name in own}
        # an optimizer needs a tensor even if a stage has none; this one never has a gradient
        nothing = {"nothing": torch.empty(0)} if named else {}
        self.slices: dict[str, Tensor] = self._own_parameters or nothing
        self.header = StepHeader(model, len(named), [name in own for name in named])
        device = next((p.device for p in named.values()), torch.device("cpu"))
        self._own_header = torch.zeros(self.header.length, dtype=self.header.dtype, device=device)
        self._summed_header = torch.zeros_like(self._own_header)
        self.header.bind(self._own_header, self._summed_header)

    def begin(self) -> None:
        """Drop the gradients of the last step, because autograd adds to `.grad`."""
        for parameter in self._own_parameters.values():
            parameter.grad = None

    @property
    def own(self) -> Iterator[Tensor]:
        """The gradients of this stage."""
        return gradients_of(self._own_parameters.values())

    @property
    def touched(self) -> list[bool]:
        """Which parameters have a gradient; those of other stages count as touched."""
        return [name not in self._own or self._own_parameters[name].grad is not None for name in self._names]

    def reduce(self) -> None:
        """Sum this stage's gradients over its replicas, and the step headers over all workers."""
        if self._peers is not None:
            for parameter in self._own_parameters.values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            _sum(self._peers, [p.grad for p in self._own_parameters.values() if p.grad is not None])
        self._summed_header.copy_(self._own_header)
        self._transport.all_reduce(self._summed_header)

    def skip(self, missing: list[int]) -> None:
        """Do not update parameters without a gradient at any worker, as a single process would not."""
        for number in missing:
            if (name := self._names[number]) in self._own_parameters:
                self._own_parameters[name].grad = None

    def publish(self) -> None:
        """Do nothing: no other worker reads this stage."""

    def norms(self, slices: list[Tensor]) -> Tensor:
        """The norms of this stage's tensors, which are whole here."""
        return torch.stack([torch.linalg.vector_norm(tensor) for tensor in slices])

    def norm(self, slices: list[Tensor]) -> Tensor:
        """The norm over all stages; every replica of a stage contributes the same."""
        square = sum(
            (tensor.square().sum() for tensor in slices), torch.zeros((), device=self._own_header.device)
        )
        whole = torch.as_tensor(square, dtype=self._own_header.dtype).reshape(1)
        return (self._transport.all_reduce(whole) / self._replicas).sqrt_().reshape(())

    @contextmanager
    def consolidated(self, model: nn.Module) -> Iterator[None]:
        """Copy each stage's parameters from its first replica; buffers are equal everywhere already."""
        own = {name: p.detach() for name, p in model.named_parameters() if name in self._own}
        found = self._from_all_stages(own)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in found:
                    parameter.copy_(found[name])
        yield

    def collect(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        """The whole model, and the optimizer state of every stage."""
        with self.consolidated(model):
            packed = state.pack(model, optimizer)
        whole = {name: tensor for name, tensor in packed.items() if name.startswith("model/")}
        optimizer_state = {name: t for name, t in packed.items() if name.startswith("optimizer/")}
        own = {name: t for name, t in optimizer_state.items() if name.split("/", 2)[-1] in self._own}
        return {**whole, **self._from_all_stages(own)}

    def restore(self, tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
        """Load the whole model, and the optimizer state of this stage."""
        state.unpack(tensors, model, optimizer)

    def _from_all_stages(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the first replica of every stage, at all workers."""
        found: dict[str, Tensor] = {}
        device = self._own_header.device
        for root in range(self._stages):
            is_root = self._transport.rank == root
            heads = [(name, list(tensor_bytes.header(tensor).tolist())) for name, tensor in own.items()]
            for name, head in broadcast_json(self._transport, heads, root):
                tensor = own[name].clone() if is_root else tensor_bytes.allocate(head, device)
                found[name] = self._transport.broadcast(tensor, root)
        return found


def _sum(transport: Transport, gradients: list[Tensor]) -> None:
    """Sum in place, with the same bits at every replica, as one message per dtype."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        message = torch.cat([gradient.reshape(-1) for gradient in alike])
        transport.all_reduce(message)
        parts = torch.split(message, [gradient.numel() for gradient in alike])
        for gradient, part in zip(alike, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))
