"""Parameters and gradients in shared memory: workers on one host are as fast as its memory.

The parameters exist once. Backward writes each worker's gradients into its own row. Then worker i sums
*its slice* of all rows and updates *its slice* of the parameters: a reduce-scatter and a sharded optimizer
with nothing to copy back, and two barriers per step.

                 slice of worker 0      slice of worker 1
    parameters  [ w w w w w w w w w w | w w w w w w w w w w ]   read by all, written by the slice's worker
    row 0       [ g g g g g g g g g g | g g g g g g g g g g ]   of worker 0, or of the stages of replica 0
    row 1       [ g g g g g g g g g g | g g g g g g g g g g ]   of worker 1, or of the stages of replica 1
                   | sum                   | sum
    headers     [ of worker 0 ][ of worker 1 ]                  summed by all

Between hosts, slice i and the step header travel between the workers i (`transport.across`). A worker alone
on its host has one slice, which is everything. Each dtype has a bucket of its own. For an optimizer that
needs whole parameters, slices have their borders between parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.recipes.base import Scope
from manyhands.strategies import state
from manyhands.strategies.flat_layout import (
    ParameterSlot,
    aligned,
    dealt_slice,
    lay_out,
    redirect_gradient,
    slice_of,
)
from manyhands.strategies.gather import named_at_rank_0
from manyhands.strategies.step_header import StepHeader
from manyhands.transports.base import Transport, inside


@dataclass(frozen=True)
class DtypeBucket:
    """All parameters of one dtype: flat memory, this worker's slice of it, and where its sums are."""

    slots: list[ParameterSlot]
    parameters: Tensor
    rows: list[Tensor]  # gradients, by worker on this host or by replica
    headers: list[Tensor]  # step headers by worker on this host, empty in all buckets but one
    part: slice  # this worker's slice
    gradients: Tensor  # this worker's slice of the sum
    header: Tensor  # the sum of the headers, empty in all buckets but one
    message: Tensor | None  # both, where they travel between hosts

    def sums(self, row: int) -> list[_Sum]:
        """What this worker adds up, beginning with its own: its slice of all rows, and all headers."""
        rows = [self.rows[row], *(each for other, each in enumerate(self.rows) if other != row)]
        slices = [row[self.part] for row in rows]
        # with one worker per row, each gives and gets the whole; slices are uneven, their sum is not
        exchanged = self.parameters.nbytes * len(rows) // len(self.headers)
        both = (_Sum(slices, self.gradients, exchanged), _Sum(self.headers, self.header, self.header.nbytes))
        return [each for each in both if each.exchanged and not each.is_done]


class _Sum(NamedTuple):
    parts: list[Tensor]
    out: Tensor
    exchanged: int  # bytes, as an all-reduce would count them

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to add up: the only part is the sum already."""
        return len(self.parts) == 1 and self.parts[0].data_ptr() == self.out.data_ptr()

    def add(self, transport: Transport) -> Tensor:
        return transport.add_shared(self.parts, self.out)


class _BucketPlan(NamedTuple):
    dtype: torch.dtype
    slots: list[ParameterSlot]
    length: int
    header: int  # elements of a step header

    def sizes(self, rows: int, workers: int) -> list[int]:
        """Elements of the parameters, of each row of gradients, and of each worker's header."""
        return [self.length] * (1 + rows) + [aligned(self.header)] * workers

    def nbytes(self, rows: int, workers: int) -> int:
        return sum(self.sizes(rows, workers)) * self.dtype.itemsize


class Arena:
    """One worker's view of the memory it shares with the others on its host.

    Where a model is divided into `stages`, the workers of one replica fill one row together, each with the
    gradients of its `own` parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        transport: Transport,
        named: Mapping[str, nn.Parameter],
        stages: int = 1,
        own: Collection[str] | None = None,
        scope: Scope = "elements",
    ) -> None:
        self._host, self._across = transport.on_host, transport.across
        self._leads, self._deals = transport.rank == 0, scope != "elements"
        self._rows, self._row = self._host.size // stages, self._host.rank // stages
        self.named = named
        fills = [own is None or name in own for name in named]
        self.header = StepHeader(model, len(named), fills)
        self._untouched = [not each for each in fills]  # what others fill is not missing
        self.touched = list(self._untouched)
        self._buckets = self._allocate(named)
        self._slots = {slot.name: (bucket, slot) for bucket in self._buckets for slot in bucket.slots}
        self._numbers = {name: number for number, name in enumerate(named)}
        self._sums = [each for bucket in self._buckets for each in bucket.sums(self._row)]
        with_header = next(bucket for bucket in self._buckets if bucket.header.numel())
        self.header.bind(with_header.headers[self._host.rank], with_header.header)
        self.slices = self._make_slices()
        self._gradients = {name: tensor.grad for name, tensor in self.slices.items()}
        self._missing: list[int] = []
        self._names = list(named)
        for name, parameter in named.items():
            if own is None or name in own:
                self._redirect(name, parameter)

    # ---- a step

    @property
    def own(self) -> Iterator[Tensor]:
        """The gradients that this worker has put into its row in this step."""
        for name, touched, others in zip(self._names, self.touched, self._untouched, strict=True):
            if touched and not others:
                bucket, slot = self._slots[name]
                yield slot.view(bucket.rows[self._row])

    def begin(self) -> None:
        """Discard the gradients of the last step: the first ones of this step overwrite them."""
        self.touched[:] = self._untouched

    def reduce(self) -> None:
        """Sum the rows, each worker its slice, over all hosts; and the step headers."""
        self._clear_untouched()
        if self._host.size > 1:
            self._host.barrier()
            for each in self._sums:
                inside(self._host, "add_shared", each.exchanged, each.add)
        for bucket in self._buckets:
            if bucket.message is not None:
                self._across.all_reduce(bucket.message)

    def skip(self, missing: list[int]) -> None:
        """Do not update parameters without a gradient at any worker, as a single process would not."""
        for number in self._missing:
            if (name := self._names[number]) in self.slices:
                self.slices[name].grad = self._gradients[name]
        for number in missing:
            if (name := self._names[number]) in self.slices:
                self.slices[name].grad = None
        self._missing = missing

    def publish(self) -> None:
        """Announce that this worker's slice is up to date; return when all slices are."""
        if self._host.size > 1:
            self._host.barrier()

    # ---- whole tensors

    def broadcast(self) -> None:
        """Copy rank 0's parameters to every worker."""
        for bucket in self._buckets:
            if self._across.size > 1:
                self._across.broadcast(bucket.parameters[bucket.part])
        self.publish()

    def consolidated(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return an empty context: the parameters exist once, so the model is always complete."""
        return nullcontext()

    def collect(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        """The model and all slices of the optimizer state, at rank 0; nothing at the others."""
        if not self._deals:
            packed = state.pack(model, optimizer, self.gathered)
            return packed if self._leads else {}
        packed = state.pack(model, optimizer)
        own = {name: tensor for name, tensor in packed.items() if name.startswith("optimizer/")}
        if self._across.rank:  # the workers of rank 0's host have all of it
            return {}
        found = named_at_rank_0(self._host, own)
        return {**packed, **found} if self._leads else {}

    def restore(self, tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
        """Load the model, and this worker's slices of the optimizer state."""
        state.unpack(tensors, model, optimizer, self.piece)

    def norms(self, slices: list[Tensor]) -> Tensor:
        """The norms of whole tensors, of which every worker of this host holds a slice."""
        squares = torch.stack([tensor.square().sum() for tensor in slices])
        return self._host.all_reduce(squares).sqrt_()

    def norm(self, slices: list[Tensor]) -> Tensor:
        """The norm of the whole gradient."""
        if self._deals:  # each worker has other parameters
            square = sum((tensor.square().sum() for tensor in slices), torch.zeros(()))
            return self._host.all_reduce(torch.as_tensor(square).reshape(1)).sqrt_().reshape(())
        if not slices:  # no parameter had a gradient, anywhere
            return torch.zeros(())
        found: Tensor = torch.linalg.vector_norm(self.norms(slices))
        return found

    def gathered(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All slices of one kind of optimizer state, put together at rank 0.

        They meet in a row of gradients, which is unused between steps. The other ranks copy nothing: one kind
        is as large as the model.
        """
        for name, piece in pieces.items():
            bucket, slot = self._slots[name]
            bucket.rows[0][slot.within(bucket.part)].copy_(piece)
        self.publish()
        found = {}
        for name in pieces if self._leads else ():
            bucket, slot = self._slots[name]
            found[name] = slot.view(bucket.rows[0]).clone()
        self.publish()
        return found

    def piece(self, name: str, tensor: Tensor) -> Tensor:
        """This worker's slice of a whole tensor."""
        bucket, slot = self._slots[name]
        return tensor if self._deals else slot.piece(bucket.part, tensor)

    # ---- building

    def _allocate(self, named: Mapping[str, nn.Parameter]) -> list[DtypeBucket]:
        """Ask the host for memory, divide it into buckets and move the parameters there."""
        host, plans = self._host, self._plan(named)
        sizes = [plan.nbytes(self._rows, host.size) for plan in plans]
        memory = host.share("arena", sum(sizes))
        buckets = []
        for plan, block in zip(plans, torch.split(memory, sizes), strict=True):
            flat = block.view(plan.dtype)
            parameters, *rest = torch.split(flat, plan.sizes(self._rows, host.size))
            deal = (host.rank, host.size)
            part = (
                dealt_slice(plan.slots, plan.length, *deal) if self._deals else slice_of(plan.length, *deal)
            )
            rows, headers = rest[: self._rows], [each[: plan.header] for each in rest[self._rows :]]
            sums = self._targets(plan, flat[plan.length :], rows, part)
            buckets.append(DtypeBucket(plan.slots, parameters, rows, headers, part, *sums))
        for bucket in buckets:
            self._move_parameters(bucket)
        return buckets

    def _targets(
        self, plan: _BucketPlan, filled: Tensor, rows: list[Tensor], part: slice
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Where this worker's sums go: its slice of the gradients, the header, and both as one message.

        No other worker reads this worker's slice of its own row, so the sum goes there: less memory to move.
        What travels between hosts must be contiguous. A worker alone on its host has nothing to sum first.
        """
        count, travels = part.stop - part.start, self._across.size > 1
        if self._host.size == 1:
            message = filled[: count + plan.header]  # its header is behind its row
            return message[:count], message[count:], message if travels else None
        if travels:
            message = torch.zeros(count + plan.header, dtype=plan.dtype)
            return message[:count], message[count:], message
        return rows[self._row][part], torch.zeros(plan.header, dtype=plan.dtype), None

    def _plan(self, named: Mapping[str, nn.Parameter]) -> list[_BucketPlan]:
        """One bucket per dtype, and one for the header where no parameter has its dtype."""
        plans = []
        for dtype in dict.fromkeys([*(parameter.dtype for parameter in named.values()), self.header.dtype]):
            own = [(name, parameter) for name, parameter in named.items() if parameter.dtype == dtype]
            slots, end = lay_out(own)
            length = self.header.length if dtype == self.header.dtype else 0
            plans.append(_BucketPlan(dtype, slots, end, length))
        return plans

    def _move_parameters(self, bucket: DtypeBucket) -> None:
        """Move the parameters into shared memory; the host's first worker writes their values."""
        for slot in bucket.slots:
            shared = slot.view(bucket.parameters)
            if self._host.rank == 0:
                shared.copy_(slot.parameter.detach())
        self.publish()
        for slot in bucket.slots:
            slot.parameter.data = slot.view(bucket.parameters)

    def _make_slices(self) -> dict[str, Tensor]:
        """This worker's part of every parameter, maybe empty; or the parameters that are all its own."""
        if not self._deals:
            return {name: self._slice(name) for name in self.named}
        own = {name: self._whole(name) for name in self.named if self._is_own(name)}
        return own or {"nothing": torch.empty(0)}  # an optimizer needs a tensor; it never has a gradient

    def _slice(self, name: str) -> Tensor:
        """This worker's part of a parameter, maybe empty, with the sum of its gradients as `.grad`."""
        bucket, slot = self._slots[name]
        inside, begin = slot.within(bucket.part), bucket.part.start
        piece = bucket.parameters[inside]
        piece.grad = bucket.gradients[inside.start - begin : inside.stop - begin]
        return piece

    def _is_own(self, name: str) -> bool:
        bucket, slot = self._slots[name]
        return slot.inside(bucket.part)

    def _whole(self, name: str) -> Tensor:
        """A parameter in its shape, with the sum of its gradients as `.grad`."""
        bucket, slot = self._slots[name]
        whole = slot.view(bucket.parameters)
        whole.grad = slot._replace(start=slot.start - bucket.part.start).view(bucket.gradients)
        return whole

    def _redirect(self, name: str, parameter: nn.Parameter) -> None:
        """Let backward write this gradient into this worker's row."""
        bucket, slot = self._slots[name]
        redirect_gradient(parameter, slot.view(bucket.rows[self._row]), self.touched, self._numbers[name])

    def _clear_untouched(self) -> None:
        for number, touched in enumerate(self.touched):
            if not touched:
                bucket, slot = self._slots[self._names[number]]
                slot.view(bucket.rows[self._row]).zero_()
