"""One worker's loop where nobody waits in step: claim, train or test; rank 0 keeps the books.

    train ........ train ........ | drained | test ... test | drained | save | train ....
                            fence ^         everybody's parts of the test set   the next fence

At a fence no gradient is under way: what is evaluated and saved is one model, after samples that were each
used once.
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
from manyhands.engine.feed import examine
from manyhands.engine.loop import Course
from manyhands.engine.position import Ending, Position
from manyhands.engine.timing.step_timer import WARM_UP, StepTimer
from manyhands.records.record import WorkShare
from manyhands.strategies.asynchronous.base import AsyncWorker
from manyhands.strategies.asynchronous.work_queue import Lease, LeaseKind, QueueStage, Update
from manyhands.strategies.base import Votes

# Who has nothing to do while others evaluate or save does not train; all other waits are the transport's.
_ASIDE = {QueueStage.TEST: "evaluation", QueueStage.SAVE: "checkpoint"}


@dataclass(kw_only=True)
class AsyncTrainer(Course):
    """The loop of workers that go at their own pace."""

    worker: AsyncWorker
    gone: Callable[[], frozenset[int]]  # ranks that are lost
    count: Callable[[], None]  # called after each step of this worker's
    keeper: BookKeeper | None = field(default=None, init=False)  # at rank 0

    def run(self, here: Position) -> Ending:
        """Train from here until something ends it, and say what; only rank 0 knows."""
        self.saved()
        if not self.leads:
            self.worker.enter(_nothing)
            self.work()
            return "finished"
        keeper = self.keeper = BookKeeper(self, here)
        self.worker.enter(keeper.look)
        keeper.start()
        self.work()
        if keeper.failure is not None:
            raise keeper.failure
        assert keeper.ending is not None
        return keeper.ending

    def work(self) -> None:
        """Do what there is to do."""
        self.step_timer.begin(0)
        if not self.worker.trains:
            self.clock.exact = not self.clock.asynchronous  # it makes no steps of which some could be timed
            self.worker.serve(self.count)
            return
        done = 0
        while (claim := self.next()).kind is not LeaseKind.OVER:
            if claim.kind is LeaseKind.TRAIN:
                batches = self.feed.piece(claim.start, claim.size)
                self.worker.step(batches, claim, self.schedule(claim.start))
                self.count()
                done += claim.size
                self.step_timer.stepped(done)
            else:
                with self.clock.phase("evaluation"):
                    samples = np.arange(claim.start, claim.start + claim.size, dtype=np.int64)
                    sums = examine(self.worker.model, self.feed, [Request(0, samples)])
                    self.worker.tested(claim, *sums.tolist())

    def next(self) -> Lease:
        """What to do now; the time until then is charged to what everybody is about."""
        stage = QueueStage.TRAIN
        while True:
            with self.clock.phase(_ASIDE.get(stage, self.clock.current)):
                claim = self.worker.claim(stage)
            if claim.kind is not LeaseKind.LATER:
                return claim
            stage = claim.stage


@final
class BookKeeper:
    """Rank 0's books: how far the run is, and what happens at fences."""

    def __init__(self, trainer: AsyncTrainer, here: Position) -> None:
        self._trainer, self._here, self._worker = trainer, here, trainer.worker
        self.ending: Ending | None = None
        self.failure: DivergedError | None = None  # raised when all have been sent home
        self._ledger = trainer.worker.queue
        self._tests = len(trainer.feed.task.test)
        self._fence = here.samples  # where the last one was
        self._pending: Update | None = None  # told when it is known whether it was evaluated after
        self._gone: frozenset[int] = frozenset()
        self._reached = 0.0  # training time at the fence
        self.staleness: Counter[int] = Counter()  # of the updates
        # of all workers together: each has its first steps
        self.step_timer = StepTimer(trainer.clock, WARM_UP * trainer.spec.workers, traced=0)
        self.lost: list[str] = []  # workers

    @property
    def shares(self) -> list[WorkShare]:
        """What each rank did."""
        return [WorkShare(samples=s, steps=n, dropped=d) for s, n, d in self._ledger.shares()]

    def start(self) -> None:
        """Let the others begin, if there is anything left to do."""
        self.ending = self._trainer.ending(self._here, Votes())
        self.step_timer.begin(self._here.samples)
        with self._worker.lock():
            self._ledger.begin(self._here.samples, self._here.step)
            if self.ending is not None:
                self._ledger.end()
            else:
                self._ledger.train(self._until())

    def look(self) -> None:
        """See what has happened since the last time, and what follows from it."""
        queue = self._ledger
        lost = self._trainer.gone()
        with self._worker.lock():
            for rank in sorted(lost - self._gone):
                queue.put_back(rank)
                self._worker.forget(rank)
                self.lost.append(f"worker {rank} after {queue.samples:,} samples of all")
            updates = queue.read()
            stage, drained = queue.stage, queue.is_drained(self._tests)
            if stage is QueueStage.TRAIN and self._trainer.votes().any:
                queue.halt()
        self._gone = lost
        for update in updates:
            if self.failure is None:
                self._note(update)
        if self.failure is not None:
            return  # all are on their way home
        if drained and stage is QueueStage.TRAIN:
            self._arrive()
        elif drained and stage is QueueStage.TEST:
            self._evaluated()

    def _note(self, update: Update) -> None:
        """An update was made; the one before it can be told."""
        self._tell(None)
        here, self._pending = self._here, update
        if update.staleness >= 0:
            self.staleness[update.staleness] += 1
        here.step, here.samples, here.loss = update.step, update.samples, update.loss
        if not math.isfinite(here.loss):
            with self._worker.lock():
                self._ledger.end()
            self.failure = self._trainer.diverged(here, update.lr, min(update.start, self._fence))
            return
        self._trainer.noted(here.loss)
        self.step_timer.stepped(here.samples)

    def _tell(self, test_loss: float | None) -> None:
        if self._pending is None:
            return
        update, self._pending = self._pending, None
        epoch = update.start // self._trainer.feed.order.n
        stale = update.staleness if update.staleness >= 0 else None
        self._trainer.tell(self._here, epoch, update.lr, test_loss, update.worker, stale)

    def _arrive(self) -> None:
        """All is used that was claimed before the fence."""
        trainer, here = self._trainer, self._here
        ending = trainer.ending(here, trainer.votes())
        if ending == "finished" or trainer.milestone(here.samples, here.samples - self._fence):
            self._reached = trainer.clock.training_seconds
            if not self._worker.trains:
                trainer.clock.switch("evaluation")
            with self._worker.lock():
                self._ledger.test()
        else:
            self._leave(ending, None)

    def _evaluated(self) -> None:
        """The test set has come back."""
        trainer, here = self._trainer, self._here
        if not self._worker.trains:
            trainer.clock.switch("other")
        score, loss = self._ledger.sums
        test_loss = loss / self._tests
        trainer.judge(here, score / self._tests, test_loss, self._reached)
        self._leave(trainer.ending(here, trainer.votes()), test_loss)

    def _leave(self, ending: Ending | None, test_loss: float | None) -> None:
        """Save if it is time to, and go on to the next fence, or home."""
        trainer, here, queue = self._trainer, self._here, self._ledger
        self._tell(test_loss)
        if ending is not None or trainer.votes().save:
            with self._worker.lock():
                queue.hold()
            with trainer.clock.phase("checkpoint"):
                trainer.save(here)
            trainer.saved()
        self._fence, self.ending = here.samples, ending
        with self._worker.lock():
            if ending is not None:
                queue.end()
            else:
                queue.train(self._until())

    def _until(self) -> int:
        """The next fence: an evaluation, or the end."""
        trainer, samples = self._trainer, self._here.samples
        interval = trainer.interval
        fences = [(samples // interval + 1) * interval, trainer.feed.horizon(trainer.spec)]
        if trainer.spec.strategy_options.get("backup") is not None:  # no round goes on in the next epoch
            fences.append((samples // trainer.feed.order.n + 1) * trainer.feed.order.n)
        return min(fences if trainer.spec.samples is None else [*fences, trainer.spec.samples])


def _nothing() -> None:
    """Only rank 0 keeps books."""
