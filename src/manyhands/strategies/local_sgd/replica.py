"""A worker's copy of the model and of the optimizer state, as flat memory.

Everything in which workers may differ lies in one row per dtype, so that an average is one message and
nothing is gathered or scattered. Parameters, buffers and the optimizer state are views of it:

    row   [ weights | buffers | header | momentum or moments ... | numbers ]
            `---------------'                                              what is evaluated
            `------------------------'                                     what nesterov and elastic exchange
            `-----------------------------------------------------------'  what mean exchanges

The header (loss and votes) is summed, not averaged. A buffer (a norm's running mean) moves by the mean of its
changes since all workers had the same value, so rounding never touches a constant one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core.errors import UsageError
from manyhands.recipes.state_layout import Kept
from manyhands.strategies.consistency import trained_parameters
from manyhands.strategies.flat_layout import ParameterSlot, aligned, lay_out
from manyhands.strategies.state import as_tensor
from manyhands.transports.base import Transport

HEADER = 6  # elements: loss, stop, over, save, skip, weight
STEP, HAS = "step", "has state"  # columns of numbers
NOTHING = Kept({}, {})
NARROW = {torch.float32, torch.float16, torch.bfloat16}

Rows = list[Tensor]  # one per bucket
UpTo = Literal["buffers", "header", "optimizer_state"]  # the last part of a row that is exchanged


@dataclass(frozen=True)
class ReplicaBucket:
    """The tensors of one dtype: this worker's row, its parts, and the buffers that all last shared."""

    parameter_slots: list[ParameterSlot]
    buffer_slots: list[ParameterSlot]
    state_slots: dict[str, dict[str, ParameterSlot]]  # in the optimizer state: by parameter, by kind
    row: Tensor
    weights: slice
    buffers: slice
    header: slice  # in one bucket only
    optimizer_state: slice  # to the end of the row
    numbers: slice  # what the optimizer keeps once per parameter; in one bucket only
    synced_buffers: Tensor


class TrainedParameter(NamedTuple):
    """A trained parameter, and where its optimizer state lies, by kind."""

    name: str
    parameter: Tensor
    optimizer_state: dict[str, Tensor]


@final
class Replica:
    """One worker's copy: the tensors of the model and of the optimizer state, moved into rows."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, layout: Mapping[str, Kept], transport: Transport
    ) -> None:
        self._model, self._optimizer, self._transport, self._layout = model, optimizer, transport, layout
        weights = trained_parameters(model)
        buffers = {name: held for name, held in sorted(model.named_buffers()) if held.is_floating_point()}
        dtypes = dict.fromkeys(tensor.dtype for tensor in (*weights.values(), *buffers.values()))
        of_header = torch.float32 if dtypes.keys() <= NARROW else torch.float64
        self._numbers = _Numbers(layout)
        self.buckets = [
            self._bucket(dtype, weights, buffers, dtype == of_header) for dtype in dtypes | {of_header: None}
        ]
        self._trained = list(self._trained_in(self.optimizer_rows(self.rows)))
        self._header_bucket = next(n for n, each in enumerate(self.buckets) if each.row.dtype == of_header)
        bucket = self.buckets[self._header_bucket]
        self.header, self._held_numbers = bucket.row[bucket.header], bucket.row[bucket.numbers]
        self.adopt_optimizer_state()

    @property
    def rows(self) -> Rows:
        """The memory itself: writing into it changes the model."""
        return [bucket.row for bucket in self.buckets]

    def optimizer_rows(self, rows: Rows) -> Rows:
        """The optimizer state, the last part of rows."""
        return [row[bucket.optimizer_state] for bucket, row in zip(self.buckets, rows, strict=True)]

    @property
    def has_optimizer_state(self) -> bool:
        """Whether the optimizer keeps state at all."""
        return any(kept.tensors or kept.scalars for kept in self._layout.values())

    # ---- synchronizing

    def average(
        self, rows: Rows, weight: float, *, weights: bool = True, upto: UpTo = "optimizer_state"
    ) -> None:
        """Make rows the weighted mean over all workers, and headers the sum."""
        if self._transport.size == 1:
            return
        for bucket, row in zip(self.buckets, rows, strict=True):
            begin = 0 if weights else bucket.weights.stop
            end: int = getattr(bucket, upto).stop
            row[bucket.buffers].sub_(bucket.synced_buffers)
            row[begin : bucket.buffers.stop].mul_(weight)
            row[bucket.optimizer_state.start : end].mul_(weight)
            if begin < end:
                self._transport.all_reduce(row[begin:end])
            row[bucket.buffers].add_(bucket.synced_buffers)

    def adopt_optimizer_state(self) -> None:
        """Move state that the optimizer has created since the last call into rows, and its numbers."""
        numbers = []
        for _, parameter, views in self._trained:
            held = self._optimizer.state.get(parameter, {})
            for kind, view in views.items():
                if (found := held.get(kind)) is None:
                    view.zero_()
                elif found is not view:
                    held[kind] = view.copy_(found)
            numbers.append(self._numbers.of(held))
        if self._held_numbers.numel():
            # by kind, then by parameter
            self._held_numbers.copy_(torch.tensor(numbers, dtype=self._held_numbers.dtype).t().reshape(-1))

    def mark_synced(self, *, optimizer_state: bool = True) -> None:
        """All workers have the same rows now: keep the buffers, and use the optimizer state of the rows."""
        for bucket in self.buckets:
            bucket.synced_buffers.copy_(bucket.row[bucket.buffers])
        # else each worker keeps its own state; an optimizer without state has no numbers
        numbers = self._numbers.by_parameter(self._held_numbers) if optimizer_state else []
        for (name, parameter, views), mine in zip(self._trained, numbers, strict=False):
            if mine[0] > 0:  # at least one worker has used this parameter, so all get its state
                held = self._optimizer.state[parameter]
                held.update(views)
                for kind, value in self._numbers.values(self._layout[name], mine).items():
                    before = held.get(kind)
                    if isinstance(before, Tensor) and isinstance(value, Tensor):
                        before.copy_(value)
                    else:
                        held[kind] = value

    def rebase(self, buffers: Mapping[str, Tensor]) -> None:
        """Accept tensors that were set from outside; `buffers` are those that all workers last shared."""
        self.adopt_optimizer_state()
        for bucket in self.buckets:
            bucket.synced_buffers.copy_(bucket.row[bucket.buffers])
        for name, tensor in self.synced_buffers().items():
            if name in buffers:
                tensor.copy_(buffers[name])

    # ---- by name

    def named(self, rows: Rows, own: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The tensors in rows by their names in a state; the model's others from `own` or from here."""
        views = self._views(rows)
        tensors = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            rest = (own or {}).get(name, tensor.detach())
            tensors[f"model/{name}"] = views.get(id(tensor), rest)
        return tensors | self.named_optimizer_state(self.optimizer_rows(rows))

    def named_optimizer_state(self, rows: Rows) -> dict[str, Tensor]:
        """The optimizer state in the last parts of rows, by its names in a state."""
        tensors: dict[str, Tensor] = {}
        bucket = self.buckets[self._header_bucket]
        start = bucket.numbers.start - bucket.optimizer_state.start
        numbers = self._numbers.by_parameter(rows[self._header_bucket][start:])
        for (name, _, views), mine in zip(self._trained_in(rows), numbers, strict=False):
            if mine[0] > 0:
                once = self._numbers.values(self._layout[name], mine)
                tensors |= {f"optimizer/{kind}/{name}": tensor for kind, tensor in views.items()}
                tensors |= {f"optimizer/{kind}/{name}": as_tensor(value) for kind, value in once.items()}
        return tensors

    def local_buffers(self) -> dict[str, Tensor]:
        """The tensors of the model that are never exchanged: buffers that are not floating-point."""
        held, views = self._model.state_dict(keep_vars=True), self._views(self.rows)
        return {n: t for n, t in held.items() if id(t) not in views and not isinstance(t, nn.Parameter)}

    def synced_buffers(self) -> dict[str, Tensor]:
        """The buffers that all workers last shared."""
        return {s.name: s.view(bucket.synced_buffers) for bucket in self.buckets for s in bucket.buffer_slots}

    def weights(self, rows: Rows) -> dict[str, Tensor]:
        """The trained parameters, in rows that hold at least the weights."""
        pairs = zip(self.buckets, rows, strict=True)
        return {slot.name: slot.view(row) for bucket, row in pairs for slot in bucket.parameter_slots}

    def _views(self, rows: Rows) -> dict[int, Tensor]:
        """The model's tensors in rows, by identity: a tied one has several names."""
        views: dict[int, Tensor] = {}
        for bucket, row in zip(self.buckets, rows, strict=True):
            views |= {id(slot.parameter): slot.view(row) for slot in bucket.parameter_slots}
            views |= {id(slot.parameter): slot.view(row[bucket.buffers]) for slot in bucket.buffer_slots}
        return views

    def _trained_in(self, optimizer_rows: Rows) -> Iterator[TrainedParameter]:
        for bucket, row in zip(self.buckets, optimizer_rows, strict=True):
            for slot in bucket.parameter_slots:
                views = {kind: each.view(row) for kind, each in bucket.state_slots[slot.name].items()}
                yield TrainedParameter(slot.name, slot.parameter, views)

    # ---- building

    def _bucket(
        self,
        dtype: torch.dtype,
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        has_header: bool,
    ) -> ReplicaBucket:
        """A row for one dtype, with the model's tensors of that dtype moved into it."""
        (parameter_slots, first), (buffer_slots, length) = (
            lay_out((name, tensor) for name, tensor in named.items() if tensor.dtype == dtype)
            for named in (weights, buffers)
        )
        second = first + length
        third = second + aligned(HEADER) * has_header
        state_slots, length = self._state_slots(parameter_slots)
        fourth = third + length
        last = fourth + len(weights) * len(self._numbers.columns) * has_header
        row = torch.zeros(last, dtype=dtype, device=next(iter(weights.values())).device)
        for slots, part in ((parameter_slots, row[:first]), (buffer_slots, row[first:second])):
            for slot in slots:
                slot.parameter.data = slot.view(part).copy_(slot.parameter.detach())
        return ReplicaBucket(
            parameter_slots,
            buffer_slots,
            state_slots,
            row,
            weights=slice(0, first),
            buffers=slice(first, second),
            header=slice(second, second + HEADER * has_header),
            optimizer_state=slice(third, last),
            numbers=slice(fourth, last),
            synced_buffers=row[first:second].clone(),
        )

    def _state_slots(
        self, parameters: list[ParameterSlot]
    ) -> tuple[dict[str, dict[str, ParameterSlot]], int]:
        """Where the tensors of the optimizer state lie: by kind, then in the order of the weights."""
        kinds = sorted({kind for slot in parameters for kind in self._kept(slot).tensors})
        held = [(slot, kind) for kind in kinds for slot in parameters if kind in self._kept(slot).tensors]
        slots, length = lay_out(("", self._like(slot, kind)) for slot, kind in held)
        found: dict[str, dict[str, ParameterSlot]] = {slot.name: {} for slot in parameters}
        for (slot, kind), place in zip(held, slots, strict=True):
            found[slot.name][kind] = place
        return found, length

    def _kept(self, slot: ParameterSlot) -> Kept:
        return self._layout.get(slot.name, NOTHING)  # an optimizer may leave parameters out

    def _like(self, slot: ParameterSlot, kind: str) -> Tensor:
        """A tensor with the shape of the state; usually that is the parameter's, and then its strides too."""
        kept = self._kept(slot).tensors[kind]
        if kept.dtype != slot.parameter.dtype:
            raise UsageError(
                "strategy average keeps the state of an optimizer in the type of the parameters, but "
                f"{kind} of {slot.name} is {str(kept.dtype).removeprefix('torch.')}"
            )
        return (
            slot.parameter if kept.shape == slot.parameter.shape else torch.empty(kept.shape, device="meta")
        )


class _Numbers:
    """What the optimizer keeps once per parameter, as columns of numbers.

        count | has state | one column per further kind

    The count is that of its steps, or 1 if it counts none; 0 if it has no state yet. Averages may be over
    workers of which some have no state, so a further kind is divided by the part of those that have.
    """

    def __init__(self, layout: Mapping[str, Kept]) -> None:
        self._others = sorted({kind for kept in layout.values() for kind in kept.scalars} - {STEP})
        keeps = any(kept.tensors or kept.scalars for kept in layout.values())
        self.columns = [STEP, *([HAS, *self._others] if self._others else [])] if keeps else []

    def of(self, held: Mapping[str, Any]) -> list[float]:
        """The numbers of one parameter."""
        if all(value is None for value in held.values()):
            return [0.0] * len(self.columns)
        return [float(held.get(column, 1.0 if column in (STEP, HAS) else 0.0)) for column in self.columns]

    def by_parameter(self, row: Tensor) -> list[list[float]]:
        """The numbers of each parameter, from a row that holds column after column."""
        return row.view(len(self.columns), -1).t().tolist() if self.columns else []

    def values(self, kept: Kept, numbers: list[float]) -> dict[str, Tensor | float]:
        """The numbers of one parameter as the optimizer keeps them."""
        found: dict[str, Tensor | float] = {}
        for kind, first in kept.scalars.items():
            number = numbers[self.columns.index(kind)]
            value = _rounded(number) if kind == STEP else number / numbers[self.columns.index(HAS)]
            if isinstance(first, Tensor):
                found[kind] = first.detach().clone().fill_(value)
            else:
                found[kind] = type(first)(round(value) if isinstance(first, int) else value)
        return found


def _rounded(count: float) -> int:
    """A mean of step counts as a count: some workers may have had no sample in some steps."""
    return max(1, round(count))
