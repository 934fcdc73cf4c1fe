"""The loop of asynchronous workers: lease, then train or test; rank 0 keeps the books.

    train ........ train ........ | drained | test ... test | drained | save | train ....
                       sync point ^         all workers' parts of the test set   the next sync point

At a sync point no gradient is in flight: what is evaluated and saved is one model, after samples that were
each used once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import numpy as np

from manyhands.core.errors import DivergedError
from manyhands.data.base import Request
from manyhands.engine.feed import mean_loss, test_sums
from manyhands.engine.loop import TrainingLoop
from manyhands.engine.position import Ending, Position
from manyhands.engine.timing.step_timer import WARM_UP, StepTimer
from manyhands.records.record import WorkShare
from manyhands.strategies.asynchronous.base import AsyncRank, AsyncWorker, ParameterServer, QueueOwner
from manyhands.strategies.asynchronous.work_queue import EvaluationSums, Lease, LeaseKind, QueueStage, Update
from manyhands.strategies.base import Votes

# A worker that waits while others evaluate or save does not train; all other waits are the transport's.
_WAITING_PHASES = {QueueStage.TEST: "evaluation", QueueStage.SAVE: "checkpoint"}


@dataclass(kw_only=True)
class AsyncTrainer(TrainingLoop):
    """The loop of workers that do not step together."""

    worker: AsyncRank
    gone: Callable[[], frozenset[int]]  # ranks that are lost
    count: Callable[[], None]  # called after each step of this worker
    keeper: BookKeeper | None = field(default=None, init=False)  # at rank 0

    def run(self, here: Position) -> Ending:
        """Train from here until something ends the run. Return what ended it, which only rank 0 knows."""
        self.restart_checkpoint_timer()
        keeper: BookKeeper | None = None
        if self.leads:
            assert isinstance(self.worker, QueueOwner)
            keeper = self.keeper = BookKeeper(self, self.worker, here)
            self.worker.poll_with(keeper.poll)
        if isinstance(self.worker, AsyncWorker):
            self.worker.enter()
        if keeper is not None:
            keeper.start()
        self.step_timer.begin(0)
        if isinstance(self.worker, ParameterServer):
            self.clock.exact = not self.clock.asynchronous  # it makes no steps of which some could be timed
            self.worker.serve(self.count)
        else:
            self.work(self.worker)
        if keeper is None:
            return "finished"
        if keeper.failure is not None:
            raise keeper.failure
        assert keeper.ending is not None
        return keeper.ending

    def work(self, worker: AsyncWorker) -> None:
        """Work on one lease after the other."""
        steps = done = 0
        while (lease := self.next(worker)).kind is not LeaseKind.OVER:
            if lease.kind is LeaseKind.TRAIN:
                batches = self.feed.piece(lease.start, lease.size)
                worker.step(batches, lease, self.schedule(lease.start))
                self.count()
                steps, done = steps + 1, done + lease.size
                self.step_timer.stepped(done)
                self.pauses.stepped(steps, done)
            else:
                with self.clock.phase("evaluation"):
                    samples = np.arange(lease.start, lease.start + lease.size, dtype=np.int64)
                    sums = test_sums(worker.model, self.feed, [Request(0, samples)])
                    worker.tested(EvaluationSums(*sums.tolist()))

    def next(self, worker: AsyncWorker) -> Lease:
        """The next lease; the time until then is charged to what all workers are doing."""
        stage = QueueStage.TRAIN
        while True:
            with self.clock.phase(_WAITING_PHASES.get(stage, self.clock.current)):
                lease = worker.lease(stage)
            if lease.kind is not LeaseKind.LATER:
                return lease
            stage = lease.stage


@final
class BookKeeper:
    """Rank 0's books: how far the run is, and what happens at sync points."""

    def __init__(self, trainer: AsyncTrainer, owner: QueueOwner, here: Position) -> None:
        self._trainer, self._owner, self._here = trainer, owner, here
        self._queue = owner.queue
        self._serves = isinstance(owner, ParameterServer)
        self.ending: Ending | None = None
        self.failure: DivergedError | None = None  # raised when all workers have left
        self._tests = len(trainer.feed.task.test)
        self._sync_point = here.samples  # the last one
        self._pending: Update | None = None  # reported when it is known whether an evaluation followed
        self._gone: frozenset[int] = frozenset()
        self._reached = 0.0  # training time at the sync point
        self.staleness: Counter[int] = Counter()  # of the updates
        # of all workers together: each has its own first steps
        self.step_timer = StepTimer(trainer.clock, WARM_UP * trainer.spec.workers, traced=0)
        self.lost: list[str] = []  # workers

    @property
    def shares(self) -> list[WorkShare]:
        """What each rank did."""
        return [WorkShare(samples=s, steps=n, dropped=d) for s, n, d in self._queue.shares()]

    def start(self) -> None:
        """Let the workers begin, if there is anything left to do."""
        self.ending = self._trainer.ending(self._here, Votes())
        self.step_timer.begin(self._here.samples)
        with self._owner.lock():
            self._queue.begin(self._here.samples, self._here.step)
            if self.ending is not None:
                self._queue.end()
            else:
                self._queue.train(self._next_sync_point())

    def poll(self) -> None:
        """Read what has happened since the last call, and act on it."""
        queue = self._queue
        lost = self._trainer.gone()
        with self._owner.lock():
            for rank in sorted(lost - self._gone):
                queue.put_back(rank)
                self._owner.forget(rank)
                self.lost.append(f"worker {rank} after {queue.samples:,} samples of all")
            updates = queue.read()
            stage, drained = queue.stage, queue.is_drained(self._tests)
            if stage is QueueStage.TRAIN and self._trainer.votes().any:
                queue.halt()
        self._gone = lost
        for update in updates:
            if self.failure is None:
                self._record(update)
        if self.failure is not None:
            return  # all workers are about to leave
        if drained and stage is QueueStage.TRAIN:
            self._arrive()
        elif drained and stage is QueueStage.TEST:
            self._evaluated()

    def _record(self, update: Update) -> None:
        """Take over an update, and report the one before it."""
        self._report(None)
        here, self._pending = self._here, update
        if update.staleness >= 0:
            self.staleness[update.staleness] += 1
        here.step, here.samples, here.loss = update.step, update.samples, update.loss
        if not math.isfinite(here.loss):
            with self._owner.lock():
                self._queue.end()
            self.failure = self._trainer.diverged(here, update.lr, min(update.start, self._sync_point))
            return
        self._trainer.add_loss(here.loss)
        self.step_timer.stepped(here.samples)

    def _report(self, test_loss: float | None) -> None:
        """Send the pending update to the callbacks."""
        if self._pending is None:
            return
        update, self._pending = self._pending, None
        epoch = update.start // self._trainer.feed.order.n
        stale = update.staleness if update.staleness >= 0 else None
        self._trainer.report_step(self._here, epoch, update.lr, test_loss, update.worker, stale)

    def _arrive(self) -> None:
        """A sync point is reached: everything before it is done."""
        trainer, here = self._trainer, self._here
        ending = trainer.ending(here, trainer.votes())
        if trainer.evaluates(ending, here.samples, here.samples - self._sync_point):
            self._reached = trainer.clock.training_seconds
            if self._serves:
                trainer.clock.switch("evaluation")
            with self._owner.lock():
                self._queue.test()
        else:
            self._leave(ending, None)

    def _evaluated(self) -> None:
        """All parts of the test set are evaluated."""
        trainer, here = self._trainer, self._here
        if self._serves:
            trainer.clock.switch("other")
        sums = self._queue.sums
        test_loss = mean_loss(sums.loss, sums.weight)
        if trainer.keep_best is not None and trainer.is_best(here, sums.score / self._tests):
            state = self._owner.state()
            trainer.keep_best(
                {n.removeprefix("model/"): t for n, t in state.items() if n.startswith("model/")}
            )
        trainer.record_evaluation(here, sums.score / self._tests, test_loss, self._reached)
        self._leave(trainer.ending(here, trainer.votes()), test_loss)

    def _leave(self, ending: Ending | None, test_loss: float | None) -> None:
        """Leave a sync point: save if it is time to, then train on or end the run."""
        trainer, here, queue = self._trainer, self._here, self._queue
        self._report(test_loss)
        if ending is not None or trainer.votes().save:
            with self._owner.lock():
                queue.hold()
            with trainer.clock.phase("checkpoint"):
                trainer.save(here)
            trainer.restart_checkpoint_timer()
        self._sync_point, self.ending = here.samples, ending
        with self._owner.lock():
            if ending is not None:
                queue.end()
            else:
                queue.train(self._next_sync_point())

    def _next_sync_point(self) -> int:
        """Samples at the next sync point: an evaluation, or the end."""
        trainer, samples = self._trainer, self._here.samples
        interval = trainer.interval
        points = [trainer.feed.horizon(trainer.spec)]
        if interval is not None:
            points.append((samples // interval + 1) * interval)
        if trainer.spec.round_workers is not None:  # no round continues in the next epoch
            points.append((samples // trainer.feed.order.n + 1) * trainer.feed.order.n)
        return min(points if trainer.spec.samples is None else [*points, trainer.spec.samples])
