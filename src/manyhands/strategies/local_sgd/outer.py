"""A worker's copy of a model as flat memory, and the three ways in which copies become one.

Everything that workers may differ in lies in one row for each type of number, so that a meeting is one
message and nothing is gathered or scattered. Parameters, buffers and the optimizer's memory are views of it:

    row   [ weights | buffers | told | momentum or moments ... | counts ]
            `---------------'                                              what is evaluated
            `----------------------'                                       what nesterov and elastic exchange
            `---------------------------------------------------------'    what mean exchanges

What is told is the same for everybody and no part of a mean. A buffer (a norm's running mean) moves by the
mean of its changes since all had the same, so that a constant one is not touched by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.recipes import optimizers
from manyhands.recipes.base import Recipe
from manyhands.strategies.consistency import trained
from manyhands.strategies.flat_layout import ParameterSlot, aligned, laid, lay_out
from manyhands.strategies.options import AverageOptions
from manyhands.transports.base import Transport

TOLD = 4  # numbers: loss, stop, over, save
ELASTICITY = 0.9  # of all workers together, as Zhang, Choromanska and LeCun have it
NARROW = {torch.float32, torch.float16, torch.bfloat16}

Rows = list[Tensor]  # by lane
Upto = Literal["buffers", "told", "memory"]  # the last part of a row that is exchanged


@dataclass(frozen=True)
class ReplicaBucket:
    """One type of number: what has it, this worker's row, its parts, and the buffers that all last had."""

    trained: list[ParameterSlot]
    kept: list[ParameterSlot]
    row: Tensor
    weights: slice
    buffers: slice
    told: slice  # in one lane only
    memory: slice  # to the end of the row
    counts: slice  # of the optimizer's steps, a number a parameter; in one lane only
    agreed: Tensor

    def remembered(self, memory: Tensor, kinds: tuple[str, ...]) -> dict[str, Tensor]:
        """The parts of a row's memory in which each kind of it lies as the weights do."""
        length = self.weights.stop
        return {kind: memory[n * length :][:length] for n, kind in enumerate(kinds)}


class Learner(NamedTuple):
    """A trained parameter, and where the optimizer's memory of it lies."""

    name: str
    parameter: Tensor
    memory: dict[str, Tensor]


@final
class Replica:
    """One worker's copy: the model's and the optimizer's tensors, moved into rows."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, recipe: Recipe, transport: Transport) -> None:
        self._model, self._optimizer, self._transport = model, optimizer, transport
        weights = trained(model)
        buffers = {name: held for name, held in sorted(model.named_buffers()) if held.is_floating_point()}
        kinds = dict.fromkeys(tensor.dtype for tensor in (*weights.values(), *buffers.values()))
        telling = torch.float32 if kinds.keys() <= NARROW else torch.float64
        self._kinds, self._counter = _remembered(recipe, next(iter(weights.values())).device)
        self.lanes = [
            self._lane(dtype, weights, buffers, dtype == telling) for dtype in kinds | {telling: None}
        ]
        self._learners = list(self._learners_of(self.memory(self.rows)))
        self._noted = next(n for n, lane in enumerate(self.lanes) if lane.row.dtype == telling)
        noted = self.lanes[self._noted]
        self.told, self._counts = noted.row[noted.told], noted.row[noted.counts]
        self.remember()

    @property
    def rows(self) -> Rows:
        """The memory itself: who writes into it changes the model."""
        return [lane.row for lane in self.lanes]

    def memory(self, rows: Rows) -> Rows:
        """What the optimizer remembers, the last part of rows."""
        return [row[lane.memory] for lane, row in zip(self.lanes, rows, strict=True)]

    @property
    def remembers(self) -> bool:
        """Whether the optimizer has a state at all."""
        return bool(self._kinds)

    # ---- a meeting

    def merge(self, rows: Rows, weight: float, *, weights: bool = True, upto: Upto = "memory") -> None:
        """Rows become the mean of all workers', each by its weight; what is told becomes the sum."""
        if self._transport.size == 1:
            return
        for lane, row in zip(self.lanes, rows, strict=True):
            begin = 0 if weights else lane.weights.stop
            end: int = getattr(lane, upto).stop
            row[lane.buffers].sub_(lane.agreed)
            row[begin : lane.buffers.stop].mul_(weight)
            row[lane.memory.start : end].mul_(weight)
            if begin < end:
                self._transport.all_reduce(row[begin:end])
            row[lane.buffers].add_(lane.agreed)

    def remember(self) -> None:
        """Move in what the optimizer has made by itself since the last time, and count its steps."""
        counts = []
        for _, parameter, memory in self._learners:
            held = self._optimizer.state.get(parameter, {})
            for kind, room in memory.items():
                if (found := held.get(kind)) is None:
                    room.zero_()
                elif found is not room:
                    held[kind] = room.copy_(found)
            known = any(kind in held for kind in memory)
            counts.append(float(held.get("step", 1.0)) if known else 0.0)
        if self._counts.numel():
            self._counts.copy_(torch.tensor(counts, dtype=self._counts.dtype))

    def agree(self, *, memory: bool = True) -> None:
        """All workers have the same rows now: all take note of the buffers, all optimizers remember alike."""
        for lane in self.lanes:
            lane.agreed.copy_(lane.row[lane.buffers])
        counts = self._counts.tolist() if memory else ()  # else each optimizer goes on with its own
        # an optimizer that remembers nothing has no counts
        for (_, parameter, room), count in zip(self._learners, counts, strict=False):
            if count > 0:  # someone has used this parameter, so all remember it
                held = self._optimizer.state[parameter]
                held.update(room)
                if self._counter is not None:
                    held.setdefault("step", self._counter.clone()).fill_(_whole(count))

    def rebase(self, buffers: Mapping[str, Tensor]) -> None:
        """The tensors were set from outside; all workers last had these buffers, or those that are there."""
        self.remember()
        for lane in self.lanes:
            lane.agreed.copy_(lane.row[lane.buffers])
        for name, tensor in self.agreed().items():
            if name in buffers:
                tensor.copy_(buffers[name])

    # ---- by name

    def named(self, rows: Rows, own: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What lies in rows, as a state names it; of the rest of the model `own`, or what is here."""
        places = self._places(rows)
        tensors = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            rest = (own or {}).get(name, tensor.detach())
            tensors[f"model/{name}"] = places.get(id(tensor), rest)
        return tensors | self.remembered(self.memory(rows))

    def remembered(self, memory: Rows) -> dict[str, Tensor]:
        """What lies in the memory of rows, as a state names it."""
        tensors: dict[str, Tensor] = {}
        noted = self.lanes[self._noted]
        counts = memory[self._noted][noted.counts.start - noted.memory.start :].tolist()
        for (name, _, held), count in zip(self._learners_of(memory), counts, strict=False):
            if count > 0:
                tensors |= {f"optimizer/{kind}/{name}": tensor for kind, tensor in held.items()}
                if self._counter is not None:
                    tensors[f"optimizer/step/{name}"] = self._counter.clone().fill_(_whole(count))
        return tensors

    def rest(self) -> dict[str, Tensor]:
        """The model's tensors that stay each worker's own: buffers that are no floating-point numbers."""
        held, places = self._model.state_dict(keep_vars=True), self._places(self.rows)
        return {n: t for n, t in held.items() if id(t) not in places and not isinstance(t, nn.Parameter)}

    def agreed(self) -> dict[str, Tensor]:
        """The buffers that all workers last had."""
        return {spot.name: laid(lane.agreed, spot) for lane in self.lanes for spot in lane.kept}

    def weights(self, rows: Rows) -> dict[str, Tensor]:
        """The trained parameters, in rows of at least the weights."""
        pairs = zip(self.lanes, rows, strict=True)
        return {spot.name: laid(row, spot) for lane, row in pairs for spot in lane.trained}

    def _places(self, rows: Rows) -> dict[int, Tensor]:
        """The model's tensors in rows, by identity: a tied one has several names."""
        places: dict[int, Tensor] = {}
        for lane, row in zip(self.lanes, rows, strict=True):
            places |= {id(spot.parameter): laid(row, spot) for spot in lane.trained}
            places |= {id(spot.parameter): laid(row[lane.buffers], spot) for spot in lane.kept}
        return places

    def _learners_of(self, memory: Rows) -> Iterator[Learner]:
        for lane, part in zip(self.lanes, memory, strict=True):
            kinds = lane.remembered(part, self._kinds)
            for spot in lane.trained:
                held = {kind: laid(each, spot) for kind, each in kinds.items()}
                yield Learner(spot.name, spot.parameter, held)

    # ---- building

    def _lane(
        self, dtype: torch.dtype, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor], telling: bool
    ) -> ReplicaBucket:
        """A row for one type of number, with the model's tensors of that type moved in."""
        (trained, first), (kept, length) = (
            lay_out((name, tensor) for name, tensor in named.items() if tensor.dtype == dtype)
            for named in (weights, buffers)
        )
        second = first + length
        third = second + aligned(TOLD) * telling
        fourth = third + first * len(self._kinds)
        last = fourth + len(weights) * (telling and bool(self._kinds))
        row = torch.zeros(last, dtype=dtype, device=next(iter(weights.values())).device)
        for spots, part in ((trained, row[:first]), (kept, row[first:second])):
            for spot in spots:
                spot.parameter.data = laid(part, spot).copy_(spot.parameter.detach())
        return ReplicaBucket(
            trained,
            kept,
            row,
            weights=slice(0, first),
            buffers=slice(first, second),
            told=slice(second, second + TOLD * telling),
            memory=slice(third, last),
            counts=slice(fourth, last),
            agreed=row[first:second].clone(),
        )


class Outer(Protocol):
    """What becomes of the workers' copies."""

    apart: bool  # whether they differ also after they have met

    def meet(self, weight: float) -> None:
        """Workers exchange what they have and what they tell, and go on with what comes of it."""

    def learn(self, rows: Rows, weight: float, *, memory: bool) -> None:
        """Rows, which may be a copy, become what all have learned together; nobody has met."""

    def state(self) -> dict[str, Tensor]:
        """What it remembers from meeting to meeting."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a state; the replica has."""


@final
class Mean:
    """All take the mean: the null member."""

    apart = False

    def __init__(self, replica: Replica, memory: bool) -> None:
        self._replica, self._memory = replica, memory

    def meet(self, weight: float) -> None:
        """One message, in place."""
        self._replica.merge(self._replica.rows, weight, upto="memory" if self._memory else "told")
        self._replica.agree(memory=self._memory)

    def learn(self, rows: Rows, weight: float, *, memory: bool) -> None:
        """The mean."""
        self._replica.merge(rows, weight, upto="memory" if memory else "buffers")

    def state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing."""


@final
class Nesterov:
    """DiLoCo: how far the mean has come from the anchor is a gradient, of which all take one step.

    g = anchor - mean,   v <- momentum v + g,   anchor <- anchor - lr (g + momentum v)
    """

    apart = False

    def __init__(self, replica: Replica, lr: float, momentum: float, memory: bool) -> None:
        self._replica, self._lr, self._momentum, self._memory = replica, lr, momentum, memory
        self._anchors = [lane.row[lane.weights].clone() for lane in replica.lanes]
        self._velocities = [torch.zeros_like(anchor) for anchor in self._anchors]

    def meet(self, weight: float) -> None:
        """The mean, and a step towards it and beyond."""
        self._replica.merge(self._replica.rows, weight, upto="memory" if self._memory else "told")
        for lane, anchor, velocity in zip(self._replica.lanes, self._anchors, self._velocities, strict=True):
            here = lane.row[lane.weights]
            gradient = torch.sub(anchor, here, out=here)
            velocity.mul_(self._momentum).add_(gradient)
            anchor.sub_(gradient, alpha=self._lr).sub_(velocity, alpha=self._lr * self._momentum)
            here.copy_(anchor)
        self._replica.agree(memory=self._memory)

    def learn(self, rows: Rows, weight: float, *, memory: bool) -> None:
        """The mean: within a round there is no step to take."""
        self._replica.merge(rows, weight, upto="memory" if memory else "buffers")

    def state(self) -> dict[str, Tensor]:
        """The anchor and its momentum."""
        named = {"anchor": self._anchors, "momentum": self._velocities}
        return {
            f"{what}/{n}": t for what, rows in named.items() for n, t in self._replica.weights(rows).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """As it was, or from here without momentum."""
        here = self._replica.weights(self._replica.rows)
        for name, anchor in self._replica.weights(self._anchors).items():
            anchor.copy_(tensors.get(f"average/anchor/{name}", here[name]))
        for name, velocity in self._replica.weights(self._velocities).items():
            velocity.copy_(tensors.get(f"average/momentum/{name}", torch.zeros_like(velocity)))


@final
class Elastic:
    """EASGD: workers and a center pull at each other; the center is what is learned.

    x_i <- x_i - a (x_i - c),   c <- c + a sum over i of (x_i - c)
    """

    apart = True

    def __init__(self, replica: Replica, transport: Transport, elasticity: float | None) -> None:
        self._replica, self._transport = replica, transport
        self._elasticity = ELASTICITY / transport.size if elasticity is None else elasticity
        self._centers = [lane.row[lane.weights].clone() for lane in replica.lanes]

    def meet(self, weight: float) -> None:
        """All pull at once, with what they had; what an optimizer remembers stays its worker's own."""
        for lane, center in zip(self._replica.lanes, self._centers, strict=True):
            message = lane.row[: lane.told.stop].clone()
            pull, changes = message[lane.weights], message[lane.buffers]
            pull.sub_(center).mul_(self._elasticity)
            changes.sub_(lane.agreed).mul_(weight)
            lane.row[lane.weights].sub_(pull)
            if message.numel():
                self._transport.all_reduce(message)
            center.add_(pull)
            lane.row[lane.buffers].copy_(lane.agreed.add_(changes))
            lane.row[lane.told].copy_(message[lane.told])

    def learn(self, rows: Rows, weight: float, *, memory: bool) -> None:
        """The center, which all have already; of buffers and of what optimizers remember the mean."""
        self._replica.merge(rows, weight, weights=False, upto="memory" if memory else "buffers")
        for lane, row, center in zip(self._replica.lanes, rows, self._centers, strict=True):
            row[lane.weights].copy_(center)

    def state(self) -> dict[str, Tensor]:
        """Nothing: the center is the model that is saved."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The center from the model that was saved."""
        for name, center in self._replica.weights(self._centers).items():
            center.copy_(tensors[f"model/{name}"])


def build(options: AverageOptions, replica: Replica, transport: Transport) -> Outer:
    """The rule that the options name."""
    memory = options.averages_optimizer
    match options.outer:
        case "mean":
            return Mean(replica, memory)
        case "nesterov":
            return Nesterov(replica, options.outer_lr, options.outer_momentum, memory)
        case "elastic":
            return Elastic(replica, transport, options.elasticity)


def _remembered(recipe: Recipe, device: torch.device) -> tuple[tuple[str, ...], Tensor | None]:
    """What the recipe's optimizer remembers in the shape of a parameter, and how it counts its steps.

    Found by letting it step once: most of them begin to remember only then, and a worker that has had no
    sample yet must make room for what the others send.
    """
    probe = torch.zeros(1, device=device)
    probe.grad = torch.zeros_like(probe)
    optimizer = optimizers.build(recipe, [("probe", probe)], ())
    optimizer.step()
    held = {what: value for what, value in optimizer.state[probe].items() if isinstance(value, Tensor)}
    counter: Tensor | None = held.pop("step", None)
    return tuple(sorted(held)), counter


def _whole(count: float) -> int:
    """The mean of counts, of workers of whom some had no sample in some step, as a count."""
    return max(1, round(count))
