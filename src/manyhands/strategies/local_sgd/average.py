"""Local SGD: workers train copies, each on its share of every batch, and average them every few steps.

    worker 0   step step step step -+           +- step step step step -+
    worker 1   step step step step -+- average -+- step step step step -+- average ...
    worker 2   step step step step -+           +- step step step step -+

Each worker takes the mean gradient of its own share, at the learning rate of the global batch. So the mean of
the copies after one step is what one worker would have (law 4): plain SGD and momentum with an average after
every step are `allreduce`. The rules that combine the copies are in outer.py.
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
from manyhands.recipes.state_layout import state_layout
from manyhands.strategies import state
from manyhands.strategies.base import Outcome, SynchronousSetup, Votes, gradients_of
from manyhands.strategies.consistency import broadcast_buffers, check_same_model
from manyhands.strategies.local_sgd import outer
from manyhands.strategies.local_sgd.replica import Replica
from manyhands.strategies.options import AverageOptions
from manyhands.strategies.options import Outer as OuterName
from manyhands.strategies.sparse_gradients import total_norm

EXCHANGE_EVERY = (
    32  # steps after which workers exchange headers if they do not average: a signal waits no longer
)


@dataclass
class AveragePlan:
    """When workers average, and when they only exchange headers. All count alike, so all decide alike."""

    every: int | str = 16
    post_local: bool = False
    epoch: int = 0  # samples
    samples_seen: int = 0  # in the run
    round_steps: int = 0  # since the last average
    round_samples: int = 0  # of all workers since then
    silent_steps: int = 0  # since the last exchange
    silent_samples: int = 0  # of all workers since then
    peak_lr: float = 0.0
    decayed: int = 0  # 1 once the learning rate has been below its peak

    def step(self, total: int, lr: float) -> bool:
        """Count a step. Return whether workers average after it."""
        self.decayed, self.peak_lr = self.decayed | (lr < self.peak_lr), max(self.peak_lr, lr)
        before, self.samples_seen = self.samples_seen, self.samples_seen + total
        self.round_steps, self.round_samples = self.round_steps + 1, self.round_samples + total
        self.silent_steps, self.silent_samples = self.silent_steps + 1, self.silent_samples + total
        if self.post_local and not self.decayed:
            return True
        if isinstance(self.every, int):
            return self.round_steps >= self.every
        return self.every == "epoch" and self.samples_seen // self.epoch > before // self.epoch

    def begin_round(self) -> None:
        """Workers have averaged."""
        self.round_steps = self.round_samples = 0

    def exchanged(self) -> None:
        """Workers have exchanged losses and votes."""
        self.silent_steps = self.silent_samples = 0


# names in a checkpoint, which stay, and the counts of a plan that are saved under them
_OF_RUN = {"seen": "samples_seen", "peak": "peak_lr", "decayed": "decayed"}
_OF_ROUND = {
    "steps": "round_steps",
    "samples": "round_samples",
    "silent": "silent_steps",
    "untold": "silent_samples",
}  # only for as many workers as wrote them
_WEIGHTS = ("used_weights", "loss_weights")  # one number per worker, where the loss has weights


@final
class Average:
    """Steps by itself; every few steps it averages with the others, or exchanges headers with them."""

    def __init__(self, setup: SynchronousSetup) -> None:
        self.model, self._transport, self._compute = setup.model, setup.transport, setup.compute
        self._clip = setup.recipe.clip
        self._options: AverageOptions = setup.options or AverageOptions()
        check_same_model(self.model, self._transport)
        broadcast_buffers(self.model, self._transport)
        for parameter in self.model.parameters():
            self._transport.broadcast(parameter.detach())
        self._optimizer = optimizers.for_model(setup.recipe, self.model, sparse=True)
        self._replica = Replica(
            self.model, self._optimizer, state_layout(setup.recipe, self.model), self._transport
        )
        self._outer = outer.build(self._options, self._replica, self._transport)
        self._plan = AveragePlan(self._options.every, self._options.post_local, setup.epoch)
        self._used = 0  # own samples since the last average
        self._used_weight = 0.0  # and their weight, of a weighted loss
        self._weighted = False  # whether the loss is a sum and a weight instead of a mean over samples
        self._knows = False  # whether the loss was called yet
        self._example = setup.example
        self._loss = 0.0  # own part of the mean loss since the last exchange; of a weighted loss, own sum ...
        self._loss_weight = 0.0  # ... and its weight
        self._last = math.nan  # own loss of the last step that had samples
        self._differ = False  # whether the workers' copies differ
        self._may_differ = self._transport.size > 1 or self._outer.replicas_differ
        several = self._transport.size > 1 and self._replica.has_optimizer_state
        keeps = not (self._options.averages_optimizer or self._outer.replicas_differ)
        self._own_optimizer = several and keeps  # each worker keeps its own optimizer state across averages

    def step(
        self, micro_batches: Iterable[Batch], total: int, lr: float, votes: Callable[[], Votes] = Votes
    ) -> Outcome:
        """Step alone; then average, exchange headers, or neither."""
        own, weight = self._train(list(micro_batches), lr)  # all first: their sum is what each is divided by
        averages = self._plan.step(total, lr)
        self._used += own
        self._used_weight += weight or 0.0
        self._add_loss(own, weight, total)
        self._differ = self._may_differ
        alone = self._transport.size == 1
        if not (averages or alone or self._plan.silent_steps >= EXCHANGE_EVERY):
            return Outcome(self._last, Votes(), shared=False)
        outcome = Outcome(self._loss / (self._loss_weight or 1.0), votes())
        self._write_header(outcome)
        if averages:
            self._synchronize()
        elif not alone:
            self._transport.all_reduce(self._replica.header)
        self._loss = self._loss_weight = 0.0
        self._plan.exchanged()
        return outcome if alone else self._read_header()

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        """Inside, the model is what `finalize` would leave; then it is this worker's own again."""
        if not self._differ:
            yield
            return
        buckets = self._replica.buckets
        kept = [bucket.row[: bucket.buffers.stop].clone() for bucket in buckets]
        self._outer.consolidate(self._replica.rows, self._weight, optimizer_state=False)
        try:
            yield
        finally:
            for bucket, own in zip(buckets, kept, strict=True):
                bucket.row[: bucket.buffers.stop].copy_(own)

    def finalize(self) -> None:
        """Let every worker continue with what all have learned together."""
        if not self._differ:
            return
        shares = not self._own_optimizer
        self._replica.adopt_optimizer_state()
        self._outer.consolidate(self._replica.rows, self._weight, optimizer_state=shares)
        self._replica.mark_synced(optimizer_state=shares)
        self._begin_round(differ=False)

    def state(self) -> dict[str, Tensor]:
        """What all workers have learned together; where they differ, rank 0 adds each one's own tensors."""
        replica = self._replica
        replica.adopt_optimizer_state()
        counts = {name: _scalar(getattr(self._plan, field)) for name, field in (_OF_RUN | _OF_ROUND).items()}
        extra: dict[str, Tensor] = dict(counts)
        if self._differ:
            together = [row.clone() for row in replica.rows]
            self._outer.consolidate(together, self._weight, optimizer_state=True)
            tensors = replica.named(together) | self._all_replicas()
            extra |= {f"buffers/{name}": tensor for name, tensor in replica.synced_buffers().items()}
        elif self._own_optimizer:
            together = [row.clone() for row in replica.rows]
            replica.average(together, self._weight, weights=False)
            tensors = replica.named(together) | self._all_optimizer_states()
        else:
            tensors = replica.named(replica.rows)
        held = [self._used, self._loss, self._used_weight, self._loss_weight]
        own = torch.tensor(held, dtype=torch.float64)
        used, losses, *weights = torch.stack(self._transport.all_gather(own), dim=1)
        extra |= {"outer": _scalar(self._rule), "used": used.long(), "losses": losses}
        if self._weighted:
            extra |= dict(zip(_WEIGHTS, weights, strict=True))
        return tensors | {f"average/{name}": value for name, value in (extra | self._outer.state()).items()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue as this worker if as many wrote it by the same rule; else from the common model."""
        rank, size = self._transport.rank, self._transport.size
        used = tensors.get("average/used", torch.zeros(0))
        same = len(used) == size and int(tensors["average/outer"]) == self._rule
        own = _within(f"workers/{rank}/", tensors) if same else {}
        state.unpack_model(own or tensors, self.model)
        state.unpack_optimizer(self._optimizer_tensors(tensors, own, len(used)), self._optimizer)
        self._replica.rebase(_within("average/buffers/", tensors) if own else {})
        self._outer.load(tensors)
        self._begin_round(differ=bool(own))
        self._plan.exchanged()
        self._loss = self._loss_weight = 0.0
        for name, field in (_OF_RUN | _OF_ROUND if same else _OF_RUN).items():
            if (value := tensors.get(f"average/{name}")) is not None:
                setattr(self._plan, field, value.item())
        if same:
            self._used, self._loss = int(used[rank]), float(tensors["average/losses"][rank])
            if all(f"average/{name}" in tensors for name in _WEIGHTS):
                self._used_weight, self._loss_weight = (
                    float(tensors[f"average/{name}"][rank]) for name in _WEIGHTS
                )

    def _optimizer_tensors(
        self, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], ranks: int
    ) -> Mapping[str, Tensor]:
        """The optimizer state with which this worker continues, from a state that `ranks` workers saved.

        A rank that saved its own optimizer state takes it again, however many workers there are now. A new
        one begins with the mean, which is also what other strategies read.
        """
        rank = self._transport.rank
        if not _within("optimizer/", tensors):  # nothing, or nothing that this optimizer could use
            return {}
        if any(name.startswith("rank/") for name in tensors):
            saved_own = self._own_optimizer and rank < ranks
            return _within(f"rank/{rank}/", tensors) if saved_own else tensors
        return own or tensors

    # ---- parts of a step

    def _train(self, batches: list[Batch], lr: float) -> tuple[int, float | None]:
        """Step on the mean gradient of the own share; return how many samples it has, and their weight."""
        own = sum(batch.size for batch in batches)
        if not own:
            return 0, None
        self._last = 0.0
        for batch in batches:
            loss = self._compute.forward(self.model, batch, weight=batch.size / own)
            self._compute.backward(loss)
            self._last += loss.item()
        weight = self._compute.take_weight()
        self._weighted, self._knows = weight is not None, True
        skip = self._compute.overflows(gradients_of(self.model.parameters()))  # of this worker alone
        self._last /= weight or 1.0
        if (divisor := (weight or 1.0) * self._compute.scale) != 1.0:
            self._compute.divide(self.model.parameters(), divisor)
        if self._clip is not None:
            self._compute.clip(self.model.parameters(), self._clip, total_norm)
        optimizers.set_lr(self._optimizer, lr)
        self._compute.update(self._optimizer, skip=skip)
        return own, None if weight is None else weight * own

    def _look_at_the_loss(self) -> None:
        """Find out whether the loss is weighted, though this worker has had no sample yet.

        That is only so where a run is resumed at the last, short batch of an epoch.
        """
        if self._example is not None:
            modes = [(module, module.training) for module in self.model.modules()]
            self.model.eval()
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                self._compute.forward(self.model, self._example(1), weight=1.0)
            for module, training in modes:
                module.training = training
            self._weighted = self._compute.take_weight() is not None
        self._knows = True

    def _add_loss(self, own: int, weight: float | None, total: int) -> None:
        """Update this worker's part of the mean loss over all workers' samples since the last exchange."""
        if self._weighted:
            if weight:
                self._loss, self._loss_weight = self._loss + self._last * weight, self._loss_weight + weight
            return
        samples = self._plan.silent_samples
        self._loss *= (samples - total) / samples
        if own:
            self._loss += self._last * (own / samples)

    def _synchronize(self) -> None:
        self._replica.adopt_optimizer_state()
        self._outer.synchronize(self._weight)
        self._begin_round(differ=self._outer.replicas_differ)

    def _begin_round(self, *, differ: bool) -> None:
        self._plan.begin_round()
        self._used, self._used_weight, self._differ = 0, 0.0, differ

    @property
    def _weight(self) -> float:
        """This worker's weight in a mean: its part of the samples since the last average.

        Of a weighted loss, its part of the weight. All workers ask, because they exchange it.
        """
        if not self._knows:
            self._look_at_the_loss()
        if self._weighted:
            own = torch.tensor([self._used_weight], dtype=torch.float64)
            if whole := self._transport.all_reduce(own).item():  # else by samples: none of them counts
                return self._used_weight / whole
        samples = self._plan.round_samples
        return self._used / samples if samples else 1 / self._transport.size

    # ---- the header

    def _write_header(self, outcome: Outcome) -> None:
        header = self._replica.header
        values = [self._loss, *outcome.votes, self._loss_weight]
        header.copy_(torch.tensor(values, dtype=header.dtype))

    def _read_header(self) -> Outcome:
        loss, *votes, weight = self._replica.header.tolist()
        return Outcome(loss / (weight or 1.0), Votes(*(count > 0 for count in votes)))

    # ---- what is saved

    @property
    def _rule(self) -> int:
        return get_args(OuterName).index(self._options.outer)

    def _all_replicas(self) -> dict[str, Tensor]:
        """Each worker's own tensors, at rank 0; the others only send theirs."""
        rows = [self._collect(row) for row in self._replica.rows]
        rest = {name: self._collect(tensor) for name, tensor in self._replica.local_buffers().items()}
        tensors: dict[str, Tensor] = {}
        for rank in range(self._transport.size if self._transport.rank == 0 else 0):
            of_rank = {name: held[rank] for name, held in rest.items()}
            named = self._replica.named([row[rank] for row in rows], of_rank)
            tensors |= {f"{self._prefix(name)}/{rank}/{name}": tensor for name, tensor in named.items()}
        return tensors

    def _prefix(self, name: str) -> str:
        """`rank` for tensors that stay a rank's own across averages, `workers` for those of this round."""
        return "rank" if self._own_optimizer and name.startswith("optimizer/") else "workers"

    def _all_optimizer_states(self) -> dict[str, Tensor]:
        """Each worker's own optimizer state, at rank 0, where the models are equal."""
        rows = [self._collect(row) for row in self._replica.optimizer_rows(self._replica.rows)]
        tensors: dict[str, Tensor] = {}
        for rank in range(self._transport.size if self._transport.rank == 0 else 0):
            named = self._replica.named_optimizer_state([row[rank] for row in rows])
            tensors |= {f"rank/{rank}/{name}": tensor for name, tensor in named.items()}
        return tensors

    def _collect(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, at rank 0; in main memory, which holds more copies than a device."""
        transport, held = self._transport, tensor.detach().cpu()
        if transport.rank:
            transport.send(held, 0)
            return []
        return [held, *(transport.recv(torch.empty_like(held), rank) for rank in range(1, transport.size))]


def _within(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _scalar(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)
