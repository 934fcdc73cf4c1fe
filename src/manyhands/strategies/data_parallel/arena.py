"""Parameters and gradients in shared memory: what makes workers on one host as fast as its memory.

The parameters live once; each worker's gradients go into its own row as backward produces them. Then worker i
sums *its slice* of all rows and updates *its slice* of the parameters: a reduce-scatter and a sharded
optimizer with nothing to copy back, and two barriers a step.

                 slice of worker 0      slice of worker 1
    parameters  [ w w w w w w w w w w | w w w w w w w w w w ]   read by all, written by the slice's
    row 0       [ g g g g g g g g g g | g g g g g g g g g g ]   of worker 0, or of the stages of replica 0
    row 1       [ g g g g g g g g g g | g g g g g g g g g g ]   of worker 1, or of the stages of replica 1
                   | sum                   | sum
    notes       [ of worker 0 ][ of worker 1 ]                  summed by all

Between hosts, slice i and the notes travel between the workers i (`transport.across`). A worker alone on its
host has one slice, which is everything. Each type of number has a lane of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.strategies import state
from manyhands.strategies.flat_layout import ALIGNED, ParameterSlot, aligned, catch, laid, lay_out
from manyhands.strategies.step_header import StepHeader
from manyhands.transports.base import Transport, inside


@dataclass(frozen=True)
class DtypeBucket:
    """All parameters of one type: flat memory, this worker's slice of it, and where its sums are."""

    spots: list[ParameterSlot]
    parameters: Tensor
    rows: list[Tensor]  # gradients, by worker on this host or by replica
    noted: list[Tensor]  # notes by worker on this host, empty in all lanes but one
    low: int
    high: int
    gradients: Tensor  # this worker's slice of the sum
    notes: Tensor  # the sum of the notes, empty in all lanes but one
    message: Tensor | None  # both, where they travel on

    def sums(self, row: int) -> list[_Sum]:
        """What this worker adds up, beginning with its own: its slice of all rows, all notes."""
        rows = [self.rows[row], *(each for other, each in enumerate(self.rows) if other != row)]
        slices = [row[self.low : self.high] for row in rows]
        # a worker for each row: what it gives and gets is the whole; slices are uneven, their sum is not
        exchanged = self.parameters.nbytes * len(rows) // len(self.noted)
        both = (_Sum(slices, self.gradients, exchanged), _Sum(self.noted, self.notes, self.notes.nbytes))
        return [each for each in both if each.exchanged and not each.is_done]


class _Sum(NamedTuple):
    parts: list[Tensor]
    out: Tensor
    exchanged: int  # bytes, as an all-reduce would count them

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to add up: one part that is the sum already."""
        return len(self.parts) == 1 and self.parts[0].data_ptr() == self.out.data_ptr()

    def add(self, transport: Transport) -> Tensor:
        """Add them up."""
        return transport.add_shared(self.parts, self.out)


class _Plan(NamedTuple):
    kind: torch.dtype
    spots: list[ParameterSlot]
    length: int
    tail: int  # of notes

    def sizes(self, rows: int, workers: int) -> list[int]:
        """Of the parameters, each row of gradients, each worker's notes."""
        return [self.length] * (1 + rows) + [aligned(self.tail)] * workers

    def nbytes(self, rows: int, workers: int) -> int:
        return sum(self.sizes(rows, workers)) * self.kind.itemsize

    def border(self, index: int, workers: int) -> int:
        """Where the slice of this worker begins; its end is where the next one's begins."""
        return index * (self.length // ALIGNED) // workers * ALIGNED


class Arena:
    """One worker's view of the memory it shares with the others on its host.

    Where a model is cut into `stages`, the workers of one replica of it fill one row together, each with the
    gradients of its `own` parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        transport: Transport,
        named: Mapping[str, nn.Parameter],
        stages: int = 1,
        own: Collection[str] | None = None,
    ) -> None:
        self._host, self._across = transport.on_host, transport.across
        self._leads = transport.rank == 0
        self._rows, self._row = self._host.size // stages, self._host.rank // stages
        self.named = named
        mine = [own is None or name in own for name in named]
        self.notes = StepHeader(model, len(named), mine)
        self._fresh = [not each for each in mine]  # what others fill is not missing
        self.touched = list(self._fresh)
        self._lanes = self._map(named)
        self._spots = {spot.name: (lane, spot) for lane in self._lanes for spot in lane.spots}
        self._numbers = {name: number for number, name in enumerate(named)}
        self._sums = [each for lane in self._lanes for each in lane.sums(self._row)]
        noted = next(lane for lane in self._lanes if lane.notes.numel())
        self.notes.bind(noted.noted[self._host.rank], noted.notes)
        self.slices = {name: self._slice(name) for name in named}
        self._gradients = {name: tensor.grad for name, tensor in self.slices.items()}
        self._missing: list[int] = []
        self._names = list(named)
        for name, parameter in named.items():
            if own is None or name in own:
                self._catch(name, parameter)

    # ---- a step

    def begin(self) -> None:
        """Forget the last step's gradients: the first of this one overwrite them."""
        self.touched[:] = self._fresh

    def reduce(self) -> None:
        """Sum the rows, each worker its slice, over all hosts, and the notes."""
        self._clear_untouched()
        if self._host.size > 1:
            self._host.barrier()
            for each in self._sums:
                inside(self._host, "add_shared", each.exchanged, each.add)
        for lane in self._lanes:
            if lane.message is not None:
                self._across.all_reduce(lane.message)

    def leave_out(self, missing: list[int]) -> None:
        """Parameters without a gradient at any worker are not updated, as in one process."""
        for number in self._missing:
            name = self._names[number]
            self.slices[name].grad = self._gradients[name]
        for number in missing:
            self.slices[self._names[number]].grad = None
        self._missing = missing

    def publish(self) -> None:
        """This worker's slice is up to date; return when everybody's is."""
        if self._host.size > 1:
            self._host.barrier()

    # ---- whole tensors

    def spread(self) -> None:
        """Rank 0's parameters everywhere."""
        for lane in self._lanes:
            if self._across.size > 1:
                self._across.broadcast(lane.parameters[lane.low : lane.high])
        self.publish()

    def whole(self, model: nn.Module) -> AbstractContextManager[None]:
        """It is: the parameters live once."""
        return nullcontext()

    def collect(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        """The model, and everybody's slices of what the optimizer remembers: at rank 0, which alone asks."""
        packed = state.pack(model, optimizer, self.together)
        return packed if self._leads else {}

    def restore(self, tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
        """The model, and this worker's slices."""
        state.unpack(tensors, model, optimizer, self.part)

    def norms(self, slices: list[Tensor]) -> Tensor:
        """Of whole tensors, of which every worker of this host holds a slice."""
        squares = torch.stack([tensor.square().sum() for tensor in slices])
        return self._host.all_reduce(squares).sqrt_()

    def norm(self, slices: list[Tensor]) -> Tensor:
        """Of the whole gradient."""
        if not slices:  # no parameter had a gradient, anywhere
            return torch.zeros(())
        found: Tensor = torch.linalg.vector_norm(self.norms(slices))
        return found

    def together(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Everybody's slices of one kind, put together at rank 0; between steps a row is free to meet in.

        The others copy nothing: a kind is as large as the model.
        """
        for name, piece in pieces.items():
            lane, spot = self._spots[name]
            low, high = self._within(lane, spot)
            lane.rows[0][low:high].copy_(piece)
        self.publish()
        found = {}
        for name in pieces if self._leads else ():
            lane, spot = self._spots[name]
            found[name] = laid(lane.rows[0], spot).clone()
        self.publish()
        return found

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """This worker's slice of a whole tensor."""
        lane, spot = self._spots[name]
        low, high = self._within(lane, spot)
        # in the order in which the parameter lies in memory, which need not be that of its indices
        flat = torch.empty_like(spot.parameter, dtype=tensor.dtype).copy_(tensor)
        flat = flat.as_strided((spot.parameter.numel(),), (1,))
        return flat[low - spot.start : high - spot.start].detach().clone()

    # ---- building

    def _map(self, named: Mapping[str, nn.Parameter]) -> list[DtypeBucket]:
        """Ask the host for memory, cut it into lanes and move the parameters in."""
        host, plans = self._host, self._plan(named)
        sizes = [plan.nbytes(self._rows, host.size) for plan in plans]
        memory = host.share("arena", sum(sizes))
        lanes = []
        for plan, block in zip(plans, torch.split(memory, sizes), strict=True):
            flat = block.view(plan.kind)
            parameters, *rest = torch.split(flat, plan.sizes(self._rows, host.size))
            low, high = (plan.border(index, host.size) for index in (host.rank, host.rank + 1))
            rows, noted = rest[: self._rows], [notes[: plan.tail] for notes in rest[self._rows :]]
            sums = self._room(plan, flat[plan.length :], rows, low, high)
            lanes.append(DtypeBucket(plan.spots, parameters, rows, noted, low, high, *sums))
        for lane in lanes:
            self._move_in(lane)
        return lanes

    def _room(
        self, plan: _Plan, filled: Tensor, rows: list[Tensor], low: int, high: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Where this worker's sums go: its slice of the gradients, the notes, and both as one message.

        Nobody else reads this worker's slice of its own row, so the sum goes there: less memory to move. What
        travels on must be in one piece. A worker alone on its host has nothing to sum before that.
        """
        count, travels = high - low, self._across.size > 1
        if self._host.size == 1:
            message = filled[: count + plan.tail]  # its notes are behind its row
            return message[:count], message[count:], message if travels else None
        if travels:
            message = torch.zeros(count + plan.tail, dtype=plan.kind)
            return message[:count], message[count:], message
        return rows[self._row][low:high], torch.zeros(plan.tail, dtype=plan.kind), None

    def _plan(self, named: Mapping[str, nn.Parameter]) -> list[_Plan]:
        """A lane a type of number, and one for the notes where no parameter has their type."""
        plans = []
        for kind in dict.fromkeys([*(parameter.dtype for parameter in named.values()), self.notes.dtype]):
            own = [(name, parameter) for name, parameter in named.items() if parameter.dtype == kind]
            spots, end = lay_out(own)
            plans.append(_Plan(kind, spots, end, self.notes.length if kind == self.notes.dtype else 0))
        return plans

    def _move_in(self, lane: DtypeBucket) -> None:
        """The parameters' own memory is given up for the shared one; the host's first worker fills it."""
        for spot in lane.spots:
            shared = laid(lane.parameters, spot)
            if self._host.rank == 0:
                shared.copy_(spot.parameter.detach())
        self.publish()
        for spot in lane.spots:
            spot.parameter.data = laid(lane.parameters, spot)

    def _slice(self, name: str) -> Tensor:
        """This worker's part of a parameter, maybe empty, with the sum of its gradients as `.grad`."""
        lane, spot = self._spots[name]
        low, high = self._within(lane, spot)
        piece = lane.parameters[low:high]
        piece.grad = lane.gradients[low - lane.low : high - lane.low]
        return piece

    def _within(self, lane: DtypeBucket, spot: ParameterSlot) -> tuple[int, int]:
        """A parameter's part of this worker's slice, from and to; from = to where it has none."""
        low = min(max(lane.low, spot.start), spot.start + spot.parameter.numel())
        return low, max(low, min(lane.high, spot.start + spot.parameter.numel()))

    def _catch(self, name: str, parameter: nn.Parameter) -> None:
        """Each gradient goes into this worker's row."""
        lane, spot = self._spots[name]
        catch(parameter, laid(lane.rows[self._row], spot), self.touched, self._numbers[name])

    def _clear_untouched(self) -> None:
        for number, touched in enumerate(self.touched):
            if not touched:
                lane, spot = self._spots[self._names[number]]
                laid(lane.rows[self._row], spot).zero_()
