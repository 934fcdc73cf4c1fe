"""The all-reduce strategy for models on CUDA: torch's DDP over NCCL, which is already at the limit.

DDP takes the plain mean over workers, so each loss is first weighted by the number of workers; the result is
the mean over samples (law 4). DDP hangs when a worker has no sample at all, so such a step (the ragged end
of an epoch) sums its gradients without DDP.

DDP waits for a gradient of every parameter, unless it searches in each step which ones the loss depends on.
Where one is missing without that search, buckets stay unsummed and the workers' messages get out of step
before DDP notices. There is no recovery from that, so the search is left out only where a model's structure
rules missing gradients out. The sums overlap with backward; what is left of them is timed as `backward`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.data.base import Batch
from manyhands.recipes import optimizers
from manyhands.strategies import state
from manyhands.strategies.base import Outcome, Replicated, SynchronousSetup, Votes, gradients_of
from manyhands.strategies.consistency import broadcast_buffers, check_same_model, trained_parameters
from manyhands.strategies.data_parallel.used_parameters import all_used
from manyhands.strategies.step_header import StepHeader

# torch 2.13 gave the option another name
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


@final
class Ddp(Replicated):
    """The whole model and the whole optimizer state at every worker."""

    def __init__(self, setup: SynchronousSetup) -> None:
        self._transport, self._compute, self._clip = setup.transport, setup.compute, setup.recipe.clip
        group: Any = getattr(setup.transport, "process_group", None)
        if group is None and setup.transport.size > 1:
            raise UsageError(
                f"{setup.transport.size} workers whose models are on CUDA sum their gradients through "
                "torch.distributed, which this transport is not: use --transport torch, or --device cpu"
            )
        check_same_model(setup.model, setup.transport)
        broadcast_buffers(setup.model, setup.transport)
        self.model = setup.model
        if setup.sync_batchnorm and group is not None:
            self.model = SyncBatchNorm.convert_sync_batchnorm(self.model, group)  # type: ignore[no-untyped-call]
        self._named = trained_parameters(self.model)
        self._searches = not all_used(self.model)
        self._replica = (
            None
            if group is None  # one worker
            else DistributedDataParallel(
                self.model,
                process_group=group,
                gradient_as_bucket_view=True,
                **_NO_BUFFERS,  # the step header does that, weighted
                find_unused_parameters=self._searches,
            )
        )
        self._header = StepHeader(self.model, len(self._named))
        device = next(self.model.parameters()).device
        self._own = torch.zeros(self._header.length, dtype=self._header.dtype, device=device)
        self._summed = torch.zeros_like(self._own)
        self._header.bind(self._own, self._summed)
        self._optimizer = optimizers.for_model(setup.recipe, self.model)

    def step(
        self, micro_batches: Iterable[Batch], total: int, lr: float, votes: Callable[[], Votes] = Votes
    ) -> Outcome:
        """Reduce during the backward pass of the last micro-batch, for all of them."""
        size, mean, samples = self._transport.size, 0.0, 0
        batches = list(micro_batches)
        all_have_samples = total >= size  # shares differ by at most one, so all workers decide alike
        for number, batch in enumerate(batches, start=1):
            reduces = all_have_samples and number == len(batches)
            replica = self._replica
            with nullcontext() if reduces or replica is None else replica.no_sync():
                weight = batch.size / total * (size if all_have_samples else 1)
                loss = self._compute.forward(replica or self.model, batch, weight)
                self._compute.backward(loss)
            mean += loss.item() / (size if all_have_samples else 1)
            samples += batch.size
        if not all_have_samples:
            self._sum_without_ddp()
        touched = [parameter.grad is not None for parameter in self._named.values()]
        if all_have_samples and not self._searches and not all(touched):
            raise ManyhandsError(self._missing(touched))
        counted = self._compute.take_weight()
        if counted is not None and all_have_samples:
            counted /= size
        skip = self._compute.overflows(gradients_of(self._named.values()))
        self._header.write(mean, votes()._replace(skip=skip), touched, samples / total, counted)
        self._transport.all_reduce(self._summed.copy_(self._own))
        outcome, _ = self._header.read()
        if (divisor := (self._header.weight or 1.0) * self._compute.scale) != 1.0:
            self._compute.divide(self._named.values(), divisor)
        if self._clip is not None:
            self._compute.clip(self._named.values(), self._clip)
        optimizers.set_lr(self._optimizer, lr)
        self._compute.update(self._optimizer, skip=outcome.votes.skip)
        return outcome

    def state(self) -> dict[str, Tensor]:
        """The tensors of the model and of the optimizer state, equal at every worker."""
        return state.pack(self.model, self._optimizer)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        state.unpack(tensors, self.model, self._optimizer)
        self._header.rebase()

    def _missing(self, touched: list[bool]) -> str:
        name = next(name for name, has in zip(self._named, touched, strict=True) if not has)
        return (
            f"parameter {name} got no gradient, though by its structure this model uses all it has in every "
            "step: gradients of this step are not summed, and training cannot go on"
        )

    def _sum_without_ddp(self) -> None:
        parameters = list(self._named.values())
        held = [float(parameter.grad is not None) for parameter in parameters]
        holders = self._transport.all_reduce(torch.tensor(held, device=self._own.device)).tolist()
        for parameter, count in zip(parameters, holders, strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._transport.all_reduce(parameter.grad)
