"""Asynchrony by script: a list sets which worker runs when, so that races, staleness and deaths repeat.

    Script([(0, "start"), (1, "start"), (0, "forward"), (1, "forward"), (1, "update"), (0, "update"), ...])

A worker stops at each point until it is its turn, and then runs alone to its next point. When the list is
used up, all workers run freely.
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
from manyhands.strategies.asynchronous.base import AsynchronousSetup, AsyncRank, QueueOwner, Work
from manyhands.strategies.base import Compute
from manyhands.tasks.base import Task
from manyhands.transports.base import Awaited, Transport
from manyhands.transports.threads import ThreadGroup
from manyhands.transports.wrapper import TransportWrapper

T = TypeVar("T")
_CPU = torch.device("cpu")
YIELD_AFTER = 0.2  # seconds after which a worker that waits for others lets another one run
Turn = tuple[int, str]


class ScriptedDeathError(Exception):
    """The script ended a worker."""


@final
class Script:
    """Decides which worker may run."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = list(turns)
        self._running: int | None = None
        self._changed = threading.Condition()
        self._gone: set[int] = set()

    def turn(self, rank: int, point: str) -> None:
        """Wait until the script lets this worker continue from this point, or ends it."""
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
        """Let another worker run."""
        with self._changed:
            if self._running == rank:
                self._running = None
                self._changed.notify_all()

    def _is_next(self, rank: int, point: str) -> bool:
        if not self._turns:
            return True
        return self._running is None and self._turns[0] in ((rank, point), (rank, "die"))


class ScriptedCompute(Compute):
    """A compute that stops before it writes parameters."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], script: Script, rank: int) -> None:
        super().__init__(loss)
        self._script, self._rank = script, rank

    def update(self, optimizer: Optimizer, *, forget: bool = True, skip: bool = False) -> None:
        self._script.turn(self._rank, "update")
        super().update(optimizer, forget=forget, skip=skip)


class ScriptedData:
    """A data set that stops before it yields a batch: forward follows."""

    def __init__(self, inner: Dataset, script: Script, rank: int) -> None:
        self._inner, self._script, self._rank = inner, script, rank

    def __len__(self) -> int:
        return len(self._inner)

    def stream(self, requests: Iterable[Request], seed: int) -> Generator[Batch, None, None]:
        """Yield each batch when the script says so."""
        for batch in self._inner.stream(requests, seed):
            self._script.turn(self._rank, "forward")
            yield batch


@final
class Scripted(TransportWrapper):
    """A transport on which a worker that waits for long lets others run."""

    def __init__(self, inner: Transport, script: Script) -> None:
        super().__init__(inner)
        self._script = script

    def rewrap(self, inner: Transport) -> Scripted:
        return Scripted(inner, self._script)

    def wait_for(self, ready: Callable[[], bool], seconds: float, what: Awaited = "work") -> bool:
        """Let others run after the time that an idle server needs to answer."""
        if self.inner.wait_for(ready, min(seconds, YIELD_AFTER), what):
            return True
        self._script.pause(self.rank)
        return self.inner.wait_for(ready, seconds, what)


@final
class ScriptJournal(Callback):
    """A callback that keeps the steps."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def on_step(self, step: StepRecord) -> None:
        self.steps.append(step)


class Played:
    """The result of a scripted run: its steps in order, the final state, each rank's share of the work."""

    def __init__(self, steps: list[StepRecord], state: dict[str, Tensor], trainer: AsyncTrainer) -> None:
        assert trainer.keeper is not None
        self.steps, self.state = steps, state
        self.shares, self.lost = trainer.keeper.shares, trainer.keeper.lost


def play(
    make: Callable[[AsynchronousSetup], AsyncRank],
    task: Task,
    recipe: Recipe,
    spec: RunSpec,
    turns: Sequence[Turn],
) -> Played:
    """Train by script, in threads, in double precision; return rank 0's steps and state.

    The points are `start`, `forward` (a piece is leased, nothing is computed yet) and, where workers write
    parameters themselves, `update`. `die` ends a worker at any point.
    """
    script = Script(turns)
    group = ThreadGroup(spec.ranks, timeout=60)
    assert spec.batch is not None
    order = Order.of(len(task.train), spec.batch, spec.seed, drop_last=spec.drop_last)
    journal, dead = ScriptJournal(), set[int]()
    torch.manual_seed(spec.seed)
    initial = {
        name: tensor.clone() for name, tensor in task.build(torch.float64).double().state_dict().items()
    }

    def work(inner: Transport) -> Played | None:
        rank = inner.rank
        transport, model, clock = Scripted(inner, script), task.build(torch.float64).double(), Clock()
        model.load_state_dict(initial)
        clock.start()
        writes = ScriptedCompute(task.loss, script, rank)
        compute = Compute(task.loss) if spec.servers else writes
        kept: dict[str, Tensor] = {}
        own = replace(task, train=ScriptedData(task.train, script, rank))
        worker = make(
            AsynchronousSetup(
                model=model,
                recipe=recipe,
                compute=compute,
                transport=transport,
                options=options.build(spec.strategy, spec.strategy_options),
                work=Work(order, spec.workers, len(task.test), task.evaluation_batch),
            )
        )

        def save(here: Position) -> None:
            assert isinstance(worker, QueueOwner)
            kept.update({name: t.clone() for name, t in worker.state().items()})

        trainer = AsyncTrainer(
            spec=spec,
            schedule=lambda samples: recipe.lr,
            feed=Feed(own, order, BatchShare(accumulate=spec.accumulate), _CPU, torch.float64, clock),
            clock=clock,
            callbacks=[journal] if rank == 0 else [],
            save=save,
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
