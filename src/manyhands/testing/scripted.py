"""Asynchrony by script: a list says who runs when, so that races, staleness and deaths happen the same way.

    Script([(0, "start"), (1, "start"), (0, "forward"), (1, "forward"), (1, "update"), (0, "update"), ...])

A worker stops at each point until it is its turn, and then runs alone to its next point. When the list is
used up, everybody runs freely.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.callbacks.base import Callback
from manyhands.data.base import Batch, Dataset, Request
from manyhands.data.order import BatchShare, Order
from manyhands.engine.async_loop import AsyncTrainer
from manyhands.engine.feed import Feed
from manyhands.engine.position import Position
from manyhands.engine.timing.clock import Clock
from manyhands.recipes.base import Recipe
from manyhands.records.record import StepRecord
from manyhands.records.spec import RunSpec
from manyhands.strategies import options
from manyhands.strategies.asynchronous.base import AsyncWorker, Work
from manyhands.strategies.base import Compute, Setup
from manyhands.tasks.base import Task
from manyhands.transports.base import Awaited, Transport
from manyhands.transports.threads import ThreadGroup
from manyhands.transports.wrapper import TransportWrapper

T = TypeVar("T")
_CPU = torch.device("cpu")
PATIENCE = 0.2  # seconds after which who waits for others is no longer the one that runs
Turn = tuple[int, str]


class ScriptedDeathError(Exception):
    """The end of a worker, by script."""


@final
class Script:
    """Whose turn it is."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = list(turns)
        self._running: int | None = None
        self._changed = threading.Condition()
        self._gone: set[int] = set()

    def turn(self, rank: int, point: str) -> None:
        """Wait until it is this worker's turn to go on from this point; it may be its turn to die."""
        with self._changed:
            self.pause(rank)
            ready = self._changed.wait_for(lambda: self._is_next(rank, point), timeout=30)
            if not ready:
                raise AssertionError(f"worker {rank} waits at {point}, but the script says {self._turns[:3]}")
            if not self._turns:
                return
            _, what = self._turns.pop(0)
            self._running = rank
        if what == "die":
            raise ScriptedDeathError(f"worker {rank} at {point}")

    def pause(self, rank: int) -> None:
        """This worker does not run any more for now."""
        with self._changed:
            if self._running == rank:
                self._running = None
                self._changed.notify_all()

    def _is_next(self, rank: int, point: str) -> bool:
        if not self._turns:
            return True
        return self._running is None and self._turns[0] in ((rank, point), (rank, "die"))


class ScriptedCompute(Compute):
    """Stops before it writes parameters."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], script: Script, rank: int) -> None:
        super().__init__(loss)
        self._script, self._rank = script, rank

    def update(self, optimizer: Optimizer, *, forget: bool = True) -> None:
        """At its turn."""
        self._script.turn(self._rank, "update")
        super().update(optimizer, forget=forget)


class ScriptedData:
    """Stops before a batch is there: what follows is forward."""

    def __init__(self, inner: Dataset, script: Script, rank: int) -> None:
        self._inner, self._script, self._rank = inner, script, rank

    def __len__(self) -> int:
        return len(self._inner)

    def stream(self, requests: Iterable[Request], seed: int) -> Generator[Batch, None, None]:
        """Each batch at its turn."""
        for batch in self._inner.stream(requests, seed):
            self._script.turn(self._rank, "forward")
            yield batch


@final
class Scripted(TransportWrapper):
    """A transport on which who waits for long lets others run."""

    def __init__(self, inner: Transport, script: Script) -> None:
        super().__init__(inner)
        self._script = script

    def rewrap(self, inner: Transport) -> Scripted:
        """By the same script."""
        return Scripted(inner, self._script)

    def wait_for(self, ready: Callable[[], bool], seconds: float, what: Awaited = "work") -> bool:
        """Not for longer than it takes a free server to answer."""
        if self.inner.wait_for(ready, min(seconds, PATIENCE), what):
            return True
        self._script.pause(self.rank)
        return self.inner.wait_for(ready, seconds, what)


@final
class ScriptJournal(Callback):
    """An observer that keeps the steps."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def started(self, start: object) -> None:
        """Nothing."""

    def stepped(self, step: StepRecord) -> None:
        """Kept."""
        self.steps.append(step)

    def ended(self, record: object) -> None:
        """Nothing."""

    def notice(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Played:
    """What a scripted run left: the steps in their order, the final state, each rank's share of the work."""

    def __init__(self, steps: list[StepRecord], state: dict[str, Tensor], trainer: AsyncTrainer) -> None:
        assert trainer.keeper is not None
        self.steps, self.state = steps, state
        self.shares, self.lost = trainer.keeper.shares, trainer.keeper.lost


def play(
    make: Callable[[Setup], AsyncWorker],
    task: Task,
    recipe: Recipe,
    spec: RunSpec,
    turns: Sequence[Turn],
) -> Played:
    """Train by script, in threads, in double precision; rank 0's steps and state.

    The points are `start`, `forward` (a piece is claimed, nothing of it is computed) and, where workers
    write parameters themselves, `update`. `die` is the end of a worker at whatever point it is.
    """
    script = Script(turns)
    group = ThreadGroup(spec.ranks, timeout=60)
    assert spec.batch is not None
    order = Order(len(task.train), spec.batch, spec.seed)
    journal, dead = ScriptJournal(), set[int]()
    torch.manual_seed(spec.seed)
    initial = {name: tensor.clone() for name, tensor in task.model().double().state_dict().items()}

    def work(inner: Transport) -> Played | None:
        rank = inner.rank
        transport, model, clock = Scripted(inner, script), task.model().double(), Clock()
        model.load_state_dict(initial)
        clock.start()
        writes = ScriptedCompute(task.loss, script, rank)
        compute = Compute(task.loss) if spec.servers else writes
        kept: dict[str, Tensor] = {}
        own = replace(task, train=ScriptedData(task.train, script, rank))
        worker = make(
            Setup(
                model,
                recipe,
                compute,
                transport,
                options=options.build(spec.strategy, spec.strategy_options),
                epoch=order.n,
                work=Work(order, spec.workers, len(task.test), task.evaluation_batch),
            )
        )
        trainer = AsyncTrainer(
            spec=spec,
            schedule=lambda samples: recipe.lr,
            feed=Feed(own, order, BatchShare(accumulate=spec.accumulate), _CPU, torch.float64, clock),
            clock=clock,
            callbacks=[journal] if rank == 0 else [],
            save=lambda here: kept.update({name: t.clone() for name, t in worker.state().items()}),
            asked_to_stop=lambda: False,
            leads=rank == 0,
            worker=worker,
            gone=lambda: frozenset(dead),
            count=lambda: None,
        )
        try:
            if rank >= spec.servers:
                script.turn(rank, "start")
            trainer.run(Position())
            if rank:
                return None
            return Played(journal.steps, kept, trainer)
        except ScriptedDeathError:
            dead.add(rank)
            return None
        except BaseException:
            dead.add(rank)
            raise
        finally:
            script.pause(rank)

    played = group.run(work)[0]
    assert played is not None
    return played
