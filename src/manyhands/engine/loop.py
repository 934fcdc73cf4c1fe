"""One worker's loop: read, step, evaluate at milestones, save, until a budget or the target ends it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from manyhands.callbacks.base import Callback
from manyhands.core.errors import DivergedError
from manyhands.engine import bad_samples
from manyhands.engine.feed import Feed, evaluate
from manyhands.engine.noise_meter import NoiseScaleMeter
from manyhands.engine.position import Ending, Position
from manyhands.engine.timing.clock import Clock
from manyhands.engine.timing.step_timer import StepTimer
from manyhands.records.record import Evaluation, StepRecord
from manyhands.records.spec import RunSpec
from manyhands.strategies.base import Votes, Worker
from manyhands.transports.base import Transport


@dataclass(kw_only=True)
class Course:
    """What every loop needs to know where it is and when it ends; the spec has nothing left to the task."""

    spec: RunSpec
    schedule: Callable[[int], float]  # samples seen -> learning rate
    feed: Feed
    clock: Clock
    callbacks: list[Callback]
    save: Callable[[Position], None]
    asked_to_stop: Callable[[], bool]
    leads: bool  # rank 0's clock is everybody's
    step_timer: StepTimer = field(init=False)
    noise_meter: NoiseScaleMeter = field(default_factory=NoiseScaleMeter)
    _saved: float = field(default=0.0, init=False)
    _warned: bool = field(default=False, init=False)
    _losses: list[float] = field(default_factory=list, init=False)  # since the last evaluation

    def __post_init__(self) -> None:
        self.step_timer = StepTimer(self.clock)

    def votes(self) -> Votes:
        """What this worker would like; rank 0's clock is everybody's."""
        clock, spec, leads = self.clock, self.spec, self.leads
        return Votes(
            stop=self.asked_to_stop(),
            over=leads and spec.seconds is not None and clock.training_seconds >= spec.seconds,
            save=leads and clock.seconds - self._saved >= spec.checkpoint_every,
        )

    def ending(self, here: Position, votes: Votes) -> Ending | None:
        """What ends the run here, if anything does; a signal at the last step comes too late to matter."""
        spec = self.spec
        if spec.stop_at_target and here.target_samples is not None:
            return "target"
        if (
            here.samples >= self.feed.horizon(spec)
            or (spec.samples is not None and here.samples >= spec.samples)
            or votes.over
        ):
            return "finished"
        return "interrupted" if votes.stop else None

    def milestone(self, samples: int, size: int) -> bool:
        """Whether the last `size` samples crossed a multiple of `evaluate_every` epochs."""
        return samples // self.interval > (samples - size) // self.interval

    @property
    def interval(self) -> int:
        """Samples between two evaluations."""
        return max(1, round(self.spec.evaluate_every * self.feed.order.n))

    def saved(self) -> None:
        """The time to the next checkpoint begins now."""
        self._saved = self.clock.seconds

    def noted(self, loss: float) -> None:
        """A step with this loss."""
        if math.isfinite(loss):
            self._losses.append(loss)

    def judge(self, here: Position, score: float, test_loss: float, seconds: float) -> None:
        """Note what the test set said after so much training time."""
        metric, target = self.feed.task.metric, self.spec.target
        assert target is not None
        if not (math.isfinite(score) and math.isfinite(test_loss)):
            self.warn(here, score, test_loss)
        here.metric = score if math.isfinite(score) else None
        if here.metric is not None and (
            here.best_metric is None
            or math.isnan(here.best_metric)  # of a checkpoint of 0.1.0
            or metric.reached(here.metric, here.best_metric)
        ):
            here.best_metric = here.metric
        if here.target_samples is None and metric.reached(score, target):
            here.target_samples, here.target_seconds = here.samples, seconds
            here.target_steps = here.step
        point = Evaluation(
            step=here.step,
            samples=here.samples,
            seconds=round(seconds, 6),
            loss=sum(self._losses) / len(self._losses) if self._losses else None,
            metric=here.metric,
            test_loss=test_loss if math.isfinite(test_loss) else None,
            noise=self.noise_meter.since(),
        )
        here.curve.append(point.model_dump(exclude_none=True))
        self._losses.clear()

    def warn(self, here: Position, score: float, test_loss: float) -> None:
        """Say once that what the test set says is not a number, and what is to blame if that can be seen."""
        if self._warned or not self.callbacks:
            return
        self._warned = True
        fine, name = math.isfinite(score), self.feed.task.metric.name
        what = f"the test loss is {test_loss:g}" if fine else f"the metric {name} is {score:g}"
        why = (
            bad_samples.in_test(self.feed)
            or "no sample of the test set is to blame: look at the model's outputs"
        )
        for callback in self.callbacks:
            callback.notice(f"{what} at step {here.step:,}: {why}")

    def evaluated(self, here: Position) -> int:
        """Samples seen at the evaluation before the last."""
        return int(here.curve[-2]["samples"]) if len(here.curve) > 1 else 0

    def diverged(self, here: Position, lr: float, since: int) -> DivergedError:
        """The sentence for a loss that is no number any more, though all samples since then are."""
        sample = bad_samples.in_training(self.feed, since, here.samples) if self.leads else ""
        if sample:
            why = f": {sample}"
        elif here.step == 1:
            why = ", before any update, and no sample is to blame: look at the model's outputs and the loss"
        else:
            why = f", with learning rate {lr:.4g}; try a smaller --lr or a longer warm-up"
        return DivergedError(
            f"the loss became {here.loss:g} at step {here.step:,} ({here.samples:,} samples seen){why}"
        )

    def doubt(self, here: Position) -> str | None:
        """What is to be said of a run that came to its end and whose metric is not a number."""
        unknown = here.curve and here.metric is None
        return f"the metric {self.feed.task.metric.name} is not a number" if unknown else None

    def tell(
        self,
        here: Position,
        epoch: int,
        lr: float,
        test_loss: float | None,
        worker: int | None = None,
        staleness: int | None = None,
    ) -> None:
        """Tell everyone who follows the run about the step that was just made."""
        if not self.callbacks:
            return
        record = StepRecord(
            step=here.step,
            epoch=epoch,
            samples=here.samples,
            loss=here.loss,
            lr=lr,
            seconds=self.clock.training_seconds,
            phases=self.clock.lap(),
            metric=None if test_loss is None else math.nan if here.metric is None else here.metric,
            test_loss=test_loss,
            worker=worker,
            staleness=staleness,
            synchronized=self.clock.exact,
        )
        for callback in self.callbacks:
            callback.stepped(record)


@dataclass(kw_only=True)
class Trainer(Course):
    """The loop of workers that step together.

    What depends on a clock or a signal is voted on, so that all workers do the same thing after the same
    step; everything else follows from numbers that all of them have.
    """

    worker: Worker
    transport: Transport

    def run(self, here: Position) -> Ending:
        """Train from here until something ends it, and say what."""
        self.saved()
        ending = self.ending(here, Votes())
        self.step_timer.begin(here.samples)
        with closing(self.feed.read(here.samples)) as reader:
            while ending is None:
                batch = next(reader)
                lr = self.schedule(here.samples)
                here.loss, votes, shared = self.worker.step(batch.micro_batches, batch.size, lr, self.votes)
                here.step, here.samples = here.step + 1, here.samples + batch.size
                if shared and not math.isfinite(here.loss):
                    raise self.diverged(here, lr, here.samples - batch.size)
                self.noted(here.loss)
                ending = self.ending(here, votes)
                test_loss = None
                if ending == "finished" or self.milestone(here.samples, batch.size):
                    test_loss = self.evaluate(here)
                    if not (shared or math.isfinite(test_loss)):  # of this loss all workers know
                        here.loss = test_loss
                        raise self.diverged(here, lr, self.evaluated(here))
                    ending = ending or self.ending(here, votes)
                if ending in ("finished", "target"):
                    self.worker.finalize()
                self.tell(here, batch.epoch, lr, test_loss)
                if ending is not None or votes.save:
                    with self.clock.phase("checkpoint"):
                        self.save(here)
                    self.saved()
                self.step_timer.stepped(here.samples)
        return ending

    def evaluate(self, here: Position) -> float:
        """Note the metric on the whole test set, and whether it reaches the target; return the test loss."""
        seconds = self.clock.training_seconds
        with self.clock.phase("evaluation"), self.worker.consolidated():
            score, loss = evaluate(self.worker.model, self.feed, self.transport)
        self.judge(here, score, loss, seconds)
        return loss
