"""A worker's copy of the model and of the optimizer state, as flat memory.

Everything in which workers may differ lies in one row per dtype, so that an average is one message and
nothing is gathered or scattered. Parameters, buffers and the optimizer state are views of it:

    row   [ weights | buffers | header | momentum or moments ... | counts ]
            `---------------'                                              what is evaluated
            `------------------------'                                     what nesterov and elastic exchange
            `-----------------------------------------------------------'  what mean exchanges

The header (loss and votes) is summed, not averaged. A buffer (a norm's running mean) moves by the mean of its
changes since all workers had the same value, so rounding never touches a constant one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.recipes import optimizers
from manyhands.recipes.base import Recipe
from manyhands.strategies.consistency import trained_parameters
from manyhands.strategies.flat_layout import ParameterSlot, aligned, lay_out
from manyhands.transports.base import Transport

HEADER = 4  # elements: loss, stop, over, save
NARROW = {torch.float32, torch.float16, torch.bfloat16}

Rows = list[Tensor]  # one per bucket
UpTo = Literal["buffers", "header", "optimizer_state"]  # the last part of a row that is exchanged


@dataclass(frozen=True)
class ReplicaBucket:
    """The tensors of one dtype: this worker's row, its parts, and the buffers that all last shared."""

    parameter_slots: list[ParameterSlot]
    buffer_slots: list[ParameterSlot]
    row: Tensor
    weights: slice
    buffers: slice
    header: slice  # in one bucket only
    optimizer_state: slice  # to the end of the row
    counts: slice  # of the optimizer's steps, one element per parameter; in one bucket only
    synced_buffers: Tensor

    def kinds_in(self, optimizer_state: Tensor, kinds: tuple[str, ...]) -> dict[str, Tensor]:
        """The parts of a row's optimizer state, one per kind, each laid out as the weights are."""
        length = self.weights.stop
        return {kind: optimizer_state[n * length :][:length] for n, kind in enumerate(kinds)}


class TrainedParameter(NamedTuple):
    """A trained parameter, and where its optimizer state lies, by kind."""

    name: str
    parameter: Tensor
    optimizer_state: dict[str, Tensor]


@final
class Replica:
    """One worker's copy: the tensors of the model and of the optimizer state, moved into rows."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, recipe: Recipe, transport: Transport) -> None:
        self._model, self._optimizer, self._transport = model, optimizer, transport
        weights = trained_parameters(model)
        buffers = {name: held for name, held in sorted(model.named_buffers()) if held.is_floating_point()}
        dtypes = dict.fromkeys(tensor.dtype for tensor in (*weights.values(), *buffers.values()))
        of_header = torch.float32 if dtypes.keys() <= NARROW else torch.float64
        self._kinds, self._counter = _optimizer_kinds(recipe, next(iter(weights.values())).device)
        self.buckets = [
            self._bucket(dtype, weights, buffers, dtype == of_header) for dtype in dtypes | {of_header: None}
        ]
        self._trained = list(self._trained_in(self.optimizer_rows(self.rows)))
        self._header_bucket = next(n for n, each in enumerate(self.buckets) if each.row.dtype == of_header)
        bucket = self.buckets[self._header_bucket]
        self.header, self._counts = bucket.row[bucket.header], bucket.row[bucket.counts]
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
        return bool(self._kinds)

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
        """Move state that the optimizer has created since the last call into rows, and count its steps."""
        counts = []
        for _, parameter, views in self._trained:
            held = self._optimizer.state.get(parameter, {})
            for kind, view in views.items():
                if (found := held.get(kind)) is None:
                    view.zero_()
                elif found is not view:
                    held[kind] = view.copy_(found)
            has_state = any(kind in held for kind in views)
            counts.append(float(held.get("step", 1.0)) if has_state else 0.0)
        if self._counts.numel():
            self._counts.copy_(torch.tensor(counts, dtype=self._counts.dtype))

    def mark_synced(self, *, optimizer_state: bool = True) -> None:
        """All workers have the same rows now: keep the buffers, and use the optimizer state of the rows."""
        for bucket in self.buckets:
            bucket.synced_buffers.copy_(bucket.row[bucket.buffers])
        counts = self._counts.tolist() if optimizer_state else ()  # else each worker keeps its own state
        # an optimizer without state has no counts
        for (_, parameter, views), count in zip(self._trained, counts, strict=False):
            if count > 0:  # at least one worker has used this parameter, so all get its state
                held = self._optimizer.state[parameter]
                held.update(views)
                if self._counter is not None:
                    held.setdefault("step", self._counter.clone()).fill_(_rounded(count))

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
        start = bucket.counts.start - bucket.optimizer_state.start
        counts = rows[self._header_bucket][start:].tolist()
        for (name, _, views), count in zip(self._trained_in(rows), counts, strict=False):
            if count > 0:
                tensors |= {f"optimizer/{kind}/{name}": tensor for kind, tensor in views.items()}
                if self._counter is not None:
                    tensors[f"optimizer/step/{name}"] = self._counter.clone().fill_(_rounded(count))
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
            kinds = bucket.kinds_in(row, self._kinds)
            for slot in bucket.parameter_slots:
                views = {kind: slot.view(each) for kind, each in kinds.items()}
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
        fourth = third + first * len(self._kinds)
        last = fourth + len(weights) * (has_header and bool(self._kinds))
        row = torch.zeros(last, dtype=dtype, device=next(iter(weights.values())).device)
        for slots, part in ((parameter_slots, row[:first]), (buffer_slots, row[first:second])):
            for slot in slots:
                slot.parameter.data = slot.view(part).copy_(slot.parameter.detach())
        return ReplicaBucket(
            parameter_slots,
            buffer_slots,
            row,
            weights=slice(0, first),
            buffers=slice(first, second),
            header=slice(second, second + HEADER * has_header),
            optimizer_state=slice(third, last),
            counts=slice(fourth, last),
            synced_buffers=row[first:second].clone(),
        )


def _optimizer_kinds(recipe: Recipe, device: torch.device) -> tuple[tuple[str, ...], Tensor | None]:
    """The kinds of state that the recipe's optimizer keeps per parameter, and its counter of steps.

    They are found by one step of a probe: most optimizers create their state only then, and a worker that has
    had no sample yet must have room for the state that the others send.
    """
    probe = torch.zeros(1, device=device)
    probe.grad = torch.zeros_like(probe)
    optimizer = optimizers.build(recipe, [("probe", probe)], ())
    optimizer.step()
    held = {kind: value for kind, value in optimizer.state[probe].items() if isinstance(value, Tensor)}
    counter: Tensor | None = held.pop("step", None)
    return tuple(sorted(held)), counter


def _rounded(count: float) -> int:
    """A mean of step counts as a count: some workers may have had no sample in some steps."""
    return max(1, round(count))
