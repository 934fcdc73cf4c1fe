"""Local SGD: workers train copies, each on its share of every batch; every so many steps these become one.

    worker 0   step step step step -+           +- step step step step -+
    worker 1   step step step step -+- average -+- step step step step -+- average ...
    worker 2   step step step step -+           +- step step step step -+

Each takes the mean gradient of its own share, at the rate of the global batch, so that the mean of the copies
after one step is what one worker would have (law 4): plain SGD and momentum with an average a step are
`allreduce`. What becomes of the copies when workers meet is in strategies/local_sgd/outer.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final, get_args

import torch
from torch import Tensor

from manyhands.data.base import Batch
from manyhands.recipes import optimizers
from manyhands.strategies import state
from manyhands.strategies.base import Outcome, Setup, Votes
from manyhands.strategies.consistency import check_same_model, spread_buffers
from manyhands.strategies.local_sgd import outer
from manyhands.strategies.options import AverageOptions
from manyhands.strategies.options import Outer as OuterName
from manyhands.strategies.sparse_gradients import sparse_parameters, total_norm

TALK = 32  # steps after which workers talk even if they do not meet: a signal waits no longer than that


@dataclass
class AveragePlan:
    """When workers talk and when they meet. All of them count alike, so all of them decide alike."""

    every: int | str = 16
    post_local: bool = False
    epoch: int = 0  # samples
    seen: int = 0  # samples of the run
    steps: int = 0  # since the last meeting
    samples: int = 0  # of all workers since then
    silent: int = 0  # steps since the last talk
    untold: int = 0  # samples of all workers since then
    peak: float = 0.0  # of the learning rate
    decayed: int = 0  # 1 once it has been below that

    def step(self, total: int, lr: float) -> bool:
        """Count a step and say whether workers meet after it."""
        self.decayed, self.peak = self.decayed | (lr < self.peak), max(self.peak, lr)
        before, self.seen = self.seen, self.seen + total
        self.steps, self.samples = self.steps + 1, self.samples + total
        self.silent, self.untold = self.silent + 1, self.untold + total
        if self.post_local and not self.decayed:
            return True
        if isinstance(self.every, int):
            return self.steps >= self.every
        return self.every == "epoch" and self.seen // self.epoch > before // self.epoch

    def met(self) -> None:
        """A round begins."""
        self.steps = self.samples = 0

    def talked(self) -> None:
        """Everybody knows everything."""
        self.silent = self.untold = 0


_COURSE = ("seen", "peak", "decayed")  # of a run, whoever its workers are
_ROUND = ("steps", "samples", "silent", "untold")  # of these workers


@final
class Average:
    """Steps by itself, and now and then talks to the others or meets them."""

    def __init__(self, setup: Setup) -> None:
        self.model, self._transport, self._compute = setup.model, setup.transport, setup.compute
        self._clip = setup.recipe.clip
        self._options: AverageOptions = setup.options or AverageOptions()
        check_same_model(self.model, self._transport)
        spread_buffers(self.model, self._transport)
        for parameter in self.model.parameters():
            self._transport.broadcast(parameter.detach())
        self._optimizer = optimizers.build(
            setup.recipe,
            self.model.named_parameters(),
            optimizers.undecayed(self.model),
            sparse=sparse_parameters(self.model),
        )
        self._replica = outer.Replica(self.model, self._optimizer, setup.recipe, self._transport)
        self._outer = outer.build(self._options, self._replica, self._transport)
        self._pace = AveragePlan(self._options.every, self._options.post_local, setup.epoch)
        self._used = 0  # own samples since the last meeting
        self._loss = 0.0  # own part of the mean loss since the last talk
        self._last = math.nan  # own loss of the last step that had samples
        self._apart = False  # whether workers differ
        self._may_part = self._transport.size > 1 or self._outer.apart
        several = self._transport.size > 1 and self._replica.remembers
        keeps = not (self._options.averages_optimizer or self._outer.apart)  # elastic's are always apart
        self._own_memory = several and keeps  # each worker's optimizer goes on with its own state

    def step(
        self, micro_batches: Iterable[Batch], total: int, lr: float, votes: Callable[[], Votes] = Votes
    ) -> Outcome:
        """A step of one's own; then meet, talk or neither."""
        own = self._train(list(micro_batches), lr)  # all of them first: their sum is what each is divided by
        meets = self._pace.step(total, lr)
        self._used += own
        self._add_loss(own, total)
        self._apart = self._may_part
        alone = self._transport.size == 1
        if not (meets or alone or self._pace.silent >= TALK):
            return Outcome(self._last, Votes(), shared=False)
        outcome = Outcome(self._loss, votes())
        self._tell(outcome)
        if meets:
            self._meet()
        elif not alone:
            self._transport.all_reduce(self._replica.told)
        self._loss = 0.0
        self._pace.talked()
        return outcome if alone else self._heard()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the model is what `settle` would leave; then each worker's own again."""
        if not self._apart:
            yield
            return
        lanes = self._replica.lanes
        kept = [lane.row[: lane.buffers.stop].clone() for lane in lanes]
        self._outer.learn(self._replica.rows, self._weight, memory=False)
        try:
            yield
        finally:
            for lane, own in zip(lanes, kept, strict=True):
                lane.row[: lane.buffers.stop].copy_(own)

    def settle(self) -> None:
        """What all have learned together becomes everybody's."""
        if not self._apart:
            return
        self._replica.remember()
        self._outer.learn(self._replica.rows, self._weight, memory=not self._own_memory)
        self._replica.agree(memory=not self._own_memory)
        self._begin_round(apart=False)

    def state(self) -> dict[str, Tensor]:
        """What all have learned together, as any strategy's; where workers differ, rank 0 adds each one's."""
        replica = self._replica
        replica.remember()
        notes = {name: _note(getattr(self._pace, name)) for name in (*_COURSE, *_ROUND)}
        if self._apart:
            together = [row.clone() for row in replica.rows]
            self._outer.learn(together, self._weight, memory=True)
            tensors = replica.named(together) | self._everybodys()
            notes |= {f"buffers/{name}": tensor for name, tensor in replica.agreed().items()}
        elif self._own_memory:
            together = [row.clone() for row in replica.rows]
            replica.merge(together, self._weight, weights=False)
            tensors = replica.named(together) | self._everybodys_memory()
        else:
            tensors = replica.named(replica.rows)
        own = torch.tensor([self._used, self._loss], dtype=torch.float64)
        used, losses = torch.stack(self._transport.all_gather(own), dim=1)
        notes |= {"outer": _note(self._rule), "used": used.long(), "losses": losses}
        return tensors | {f"average/{name}": note for name, note in (notes | self._outer.state()).items()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on as this worker, where as many wrote it by the same rule; else from what all have learned."""
        rank, size = self._transport.rank, self._transport.size
        used = tensors.get("average/used", torch.zeros(0))
        same = len(used) == size and int(tensors["average/outer"]) == self._rule
        own = _within(f"workers/{rank}/", tensors) if same else {}
        state.unpack_model(own or tensors, self.model)
        state.unpack_optimizer(self._memory(tensors, own, len(used)), self._optimizer)
        self._replica.rebase(_within("average/buffers/", tensors) if own else {})
        self._outer.load(tensors)
        self._begin_round(apart=bool(own))
        self._pace.talked()
        self._loss = 0.0
        for name in (*_COURSE, *_ROUND) if same else _COURSE:
            if (note := tensors.get(f"average/{name}")) is not None:
                setattr(self._pace, name, note.item())
        if same:
            self._used, self._loss = int(used[rank]), float(tensors["average/losses"][rank])

    def _memory(
        self, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], ranks: int
    ) -> Mapping[str, Tensor]:
        """What this worker's optimizer goes on with, of a state that so many ranks have saved.

        A rank that has saved its own memory takes it again, however many workers there are now; one that is
        new begins with the mean, which is what is saved for all other strategies too.
        """
        rank = self._transport.rank
        if not _within("optimizer/", tensors):  # nothing, or nothing that the optimizer of now could use
            return {}
        if any(name.startswith("rank/") for name in tensors):
            known = self._own_memory and rank < ranks
            return _within(f"rank/{rank}/", tensors) if known else tensors
        return own or tensors

    # ---- parts of a step

    def _train(self, batches: list[Batch], lr: float) -> int:
        """A step on the mean gradient of one's own share, of so many samples; without any, no step."""
        own = sum(batch.size for batch in batches)
        if not own:
            return 0
        self._last = 0.0
        for batch in batches:
            loss = self._compute.forward(self.model, batch, weight=batch.size / own)
            self._compute.backward(loss)
            self._last += loss.item()
        if self._clip is not None:
            self._compute.clip(self.model.parameters(), self._clip, total_norm)
        optimizers.set_lr(self._optimizer, lr)
        self._compute.update(self._optimizer)
        return own

    def _add_loss(self, own: int, total: int) -> None:
        """Keep this worker's part of the mean over all samples of all workers since the last talk."""
        untold = self._pace.untold
        self._loss *= (untold - total) / untold
        if own:
            self._loss += self._last * (own / untold)

    def _meet(self) -> None:
        self._replica.remember()
        self._outer.meet(self._weight)
        self._begin_round(apart=self._outer.apart)

    def _begin_round(self, *, apart: bool) -> None:
        self._pace.met()
        self._used, self._apart = 0, apart

    @property
    def _weight(self) -> float:
        """Of this worker in a mean: its part of the samples since the last meeting."""
        samples = self._pace.samples
        return self._used / samples if samples else 1 / self._transport.size

    # ---- what is told

    def _tell(self, outcome: Outcome) -> None:
        told = self._replica.told
        told.copy_(torch.tensor([outcome.loss, *outcome.votes], dtype=told.dtype))

    def _heard(self) -> Outcome:
        loss, *votes = self._replica.told.tolist()
        return Outcome(loss, Votes(*(count > 0 for count in votes)))

    # ---- what is saved

    @property
    def _rule(self) -> int:
        return get_args(OuterName).index(self._options.outer)

    def _everybodys(self) -> dict[str, Tensor]:
        """Each worker's own tensors; the others send theirs to rank 0, which alone has to have them all."""
        rows = [self._collect(row) for row in self._replica.rows]
        rest = {name: self._collect(tensor) for name, tensor in self._replica.rest().items()}
        tensors: dict[str, Tensor] = {}
        for rank in range(self._transport.size if self._transport.rank == 0 else 0):
            its = {name: held[rank] for name, held in rest.items()}
            named = self._replica.named([lane[rank] for lane in rows], its)
            tensors |= {f"{self._home(name)}/{rank}/{name}": tensor for name, tensor in named.items()}
        return tensors

    def _home(self, name: str) -> str:
        """What outlasts a meeting is a rank's, the rest is a worker's of this round."""
        return "rank" if self._own_memory and name.startswith("optimizer/") else "workers"

    def _everybodys_memory(self) -> dict[str, Tensor]:
        """The same of each worker's optimizer alone, where the models are equal."""
        rows = [self._collect(row) for row in self._replica.memory(self._replica.rows)]
        tensors: dict[str, Tensor] = {}
        for rank in range(self._transport.size if self._transport.rank == 0 else 0):
            named = self._replica.remembered([lane[rank] for lane in rows])
            tensors |= {f"rank/{rank}/{name}": tensor for name, tensor in named.items()}
        return tensors

    def _collect(self, tensor: Tensor) -> list[Tensor]:
        """By rank, at rank 0; on the host, whose memory holds more copies than a device's."""
        transport, held = self._transport, tensor.detach().cpu()
        if transport.rank:
            transport.send(held, 0)
            return []
        return [held, *(transport.recv(torch.empty_like(held), rank) for rank in range(1, transport.size))]


def _within(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is under a prefix, by the rest of its name."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _note(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)
