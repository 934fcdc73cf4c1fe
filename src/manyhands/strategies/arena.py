"""Parameters and gradients in shared memory: what makes workers on one host as fast as its memory.

The parameters live once; each worker's gradients go into its own row as backward produces them. Then worker i
sums *its slice* of all rows and updates *its slice* of the parameters: a reduce-scatter and a sharded
optimiser with nothing to copy back, and two barriers a step.

                 slice of worker 0      slice of worker 1
    parameters  [ w w w w w w w w w w | w w w w w w w w w w ]              read by all, written by the slice's
    row 0       [ g g g g g g g g g g | g g g g g g g g g g ][ notes 0 ]   written by worker 0
    row 1       [ g g g g g g g g g g | g g g g g g g g g g ][ notes 1 ]   written by worker 1
                   | sum                   | sum
                  + notes                + notes                           travel on between hosts

Between hosts, slice i travels between the workers i (`transport.across`). A worker alone on its host has one
slice, which is everything. Each type of number has a lane of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyhands.strategies.layout import ALIGNED, Spot, aligned, catch, laid, lay_out
from manyhands.strategies.notes import Notes
from manyhands.transports.base import Transport


@dataclass(frozen=True)
class Lane:
    """All parameters of one type: flat memory, this worker's slice of it, and where its sums are."""

    spots: list[Spot]
    parameters: Tensor
    rows: list[Tensor]  # by worker on this host; in the lane of their type, the notes are at their ends
    length: int  # of the parameters
    low: int
    high: int
    gradients: Tensor  # this worker's slice of the sum
    notes: Tensor  # the sum of the notes, empty in all lanes but one
    message: Tensor | None  # both, where they travel on

    def sums(self, rank: int) -> list[tuple[list[Tensor], Tensor]]:
        """What this worker adds up, beginning with its own, and where: its slice of all rows, all notes."""
        rows = [self.rows[rank], *(row for other, row in enumerate(self.rows) if other != rank)]
        slices = [row[self.low : self.high] for row in rows], self.gradients
        notes = [row[self.length :] for row in self.rows], self.notes
        return [pair for pair in (slices, notes) if pair[1].numel()]


class _Plan(NamedTuple):
    kind: torch.dtype
    spots: list[Spot]
    length: int
    tail: int  # of notes

    @property
    def row(self) -> int:
        return self.length + aligned(self.tail)

    def nbytes(self, workers: int) -> int:
        return (self.length + self.row * workers) * self.kind.itemsize

    def border(self, index: int, workers: int) -> int:
        """Where the slice of this worker begins; its end is where the next one's begins."""
        return index * (self.length // ALIGNED) // workers * ALIGNED


class Arena:
    """One worker's view of the memory it shares with the others on its host."""

    def __init__(self, model: nn.Module, transport: Transport, named: Mapping[str, nn.Parameter]) -> None:
        self._host, self._across = transport.on_host, transport.across
        self.named = named
        self.notes = Notes(model, len(named))
        self.touched = [False] * len(named)
        self._lanes = self._map(named)
        self._spots = {spot.name: (lane, spot) for lane in self._lanes for spot in lane.spots}
        self._numbers = {name: number for number, name in enumerate(named)}
        self._sums = [pair for lane in self._lanes for pair in lane.sums(self._host.rank)]
        noted = next(lane for lane in self._lanes if lane.notes.numel())
        self.notes.bind(noted.rows[self._host.rank][noted.length :], noted.notes)
        self.slices = {name: self._slice(name) for name in named}
        self._gradients = {name: tensor.grad for name, tensor in self.slices.items()}
        self._missing: list[int] = []
        self._names = list(named)
        for name, parameter in named.items():
            self._catch(name, parameter)

    # ---- a step

    def begin(self) -> None:
        """Forget the last step's gradients: the first of this one overwrite them."""
        self.touched[:] = [False] * len(self.touched)

    def reduce(self) -> None:
        """Sum the rows, each worker its slice, over all hosts, and the notes."""
        self._clear_untouched()
        if self._host.size > 1:
            self._host.barrier()
            for parts, out in self._sums:
                self._host.add_shared(parts, out)
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

    def whole(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Everybody's slices of some tensors put together; between steps a row is free to meet in."""
        for name, piece in pieces.items():
            lane, spot = self._spots[name]
            low, high = self._within(lane, spot)
            lane.rows[0][low:high].copy_(piece)
        self.publish()
        found = {}
        for name in pieces:
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

    def _map(self, named: Mapping[str, nn.Parameter]) -> list[Lane]:
        """Ask the host for memory, cut it into lanes and move the parameters in."""
        host, plans = self._host, self._plan(named)
        sizes = [plan.nbytes(host.size) for plan in plans]
        memory = host.share("arena", sum(sizes))
        lanes = []
        for plan, block in zip(plans, torch.split(memory, sizes), strict=True):
            parameters, *grids = torch.split(block.view(plan.kind), [plan.length] + [plan.row] * host.size)
            low, high = (plan.border(index, host.size) for index in (host.rank, host.rank + 1))
            rows = [grid[: plan.length + plan.tail] for grid in grids]
            sums = self._room(plan, rows, low, high)
            lanes.append(Lane(plan.spots, parameters, rows, plan.length, low, high, *sums))
        for lane in lanes:
            self._move_in(lane)
        return lanes

    def _room(
        self, plan: _Plan, rows: list[Tensor], low: int, high: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Where this worker's sums go: its slice of the gradients, the notes, and both as one message.

        Nobody else reads this worker's slice of its own row, so the sum goes there: less memory to move. What
        travels on must be in one piece. A worker alone on its host has nothing to sum before that.
        """
        count, travels = high - low, self._across.size > 1
        if self._host.size == 1:
            return rows[0][:count], rows[0][count:], rows[0] if travels else None
        if travels:
            message = torch.zeros(count + plan.tail, dtype=plan.kind)
            return message[:count], message[count:], message
        return rows[self._host.rank][low:high], torch.zeros(plan.tail, dtype=plan.kind), None

    def _plan(self, named: Mapping[str, nn.Parameter]) -> list[_Plan]:
        """A lane a type of number, and one for the notes where no parameter has their type."""
        plans = []
        for kind in dict.fromkeys([*(parameter.dtype for parameter in named.values()), self.notes.dtype]):
            own = [(name, parameter) for name, parameter in named.items() if parameter.dtype == kind]
            spots, end = lay_out(own)
            plans.append(_Plan(kind, spots, end, self.notes.length if kind == self.notes.dtype else 0))
        return plans

    def _move_in(self, lane: Lane) -> None:
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

    def _within(self, lane: Lane, spot: Spot) -> tuple[int, int]:
        """A parameter's part of this worker's slice, from and to; from = to where it has none."""
        low = min(max(lane.low, spot.start), spot.start + spot.parameter.numel())
        return low, max(low, min(lane.high, spot.start + spot.parameter.numel()))

    def _catch(self, name: str, parameter: nn.Parameter) -> None:
        """Each gradient goes into this worker's row."""
        lane, spot = self._spots[name]
        catch(parameter, laid(lane.rows[self._host.rank], spot), self.touched, self._numbers[name])

    def _clear_untouched(self) -> None:
        for number, touched in enumerate(self.touched):
            if not touched:
                lane, spot = self._spots[self._names[number]]
                laid(lane.rows[self._host.rank], spot).zero_()
