"""The training loop of synchronous workers: read, step, evaluate, save, until the run ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from torch import Tensor

from manyhands.callbacks.base import Callback
from manyhands.core import formatting
from manyhands.core.errors import DivergedError
from manyhands.engine import bad_samples
from manyhands.engine.feed import Feed, evaluate
from manyhands.engine.noise_meter import NoiseScaleMeter
from manyhands.engine.pauses import NoPauses, Pauses
from manyhands.engine.position import Ending, Position
from manyhands.engine.timing.clock import Clock
from manyhands.engine.timing.step_timer import StepTimer
from manyhands.records.record import Evaluation, StepRecord
from manyhands.records.spec import RunSpec
from manyhands.strategies.base import Votes, Worker
from manyhands.transports.base import Transport


@dataclass(kw_only=True)
class TrainingLoop:
    """What both training loops share: when to evaluate, save and end, and what to report."""

    spec: RunSpec  # resolved
    schedule: Callable[[int], float]  # samples seen -> learning rate
    feed: Feed
    clock: Clock
    callbacks: list[Callback]
    save: Callable[[Position], None]
    asked_to_stop: Callable[[], bool]
    asked_to_end: Callable[[], bool] = bool  # as if the budget were spent: a callback asks for it
    keep_best: Callable[[dict[str, Tensor]], None] | None = None  # gets the tensors of the best model so far
    leads: bool  # this is rank 0, whose clock decides for all
    pauses: Pauses = field(default_factory=NoPauses)
    step_timer: StepTimer = field(init=False)
    noise_meter: NoiseScaleMeter = field(default_factory=NoiseScaleMeter)
    _saved: float = field(default=0.0, init=False)
    _warned: bool = field(default=False, init=False)
    _losses: list[float] = field(default_factory=list, init=False)  # since the last evaluation

    def __post_init__(self) -> None:
        self.step_timer = StepTimer(self.clock)

    def votes(self) -> Votes:
        """What this worker votes for; only the clock of rank 0 counts."""
        leads = self.leads
        return Votes(
            stop=self.asked_to_stop(),
            over=leads and (self.pauses.over or self._spent or self.asked_to_end()),
            save=leads and self.clock.seconds - self._saved >= self.spec.checkpoint_every,
        )

    @property
    def _spent(self) -> bool:
        """Whether the time budget is spent."""
        return self.spec.seconds is not None and self.clock.training_seconds >= self.spec.seconds

    def ending(self, position: Position, votes: Votes) -> Ending | None:
        """What ends the run at this position, or None; a signal at the last step does not interrupt it."""
        spec = self.spec
        if spec.stop_at_target and position.target_samples is not None:
            return "target"
        if (
            position.samples >= self.feed.horizon(spec)
            or (spec.samples is not None and position.samples >= spec.samples)
            or votes.over
            or self.patience_is_over(position)
        ):
            return "finished"
        return "interrupted" if votes.stop else None

    def patience_is_over(self, position: Position) -> bool:
        """Whether the last evaluations brought no better metric: as many as the spec allows."""
        if self.spec.patience is None:
            return False
        scores = [point.get("metric") for point in position.curve]
        best, since = None, 0
        for score in scores:
            if score is not None and (best is None or self.is_better(score, best)):
                best, since = score, 0
            else:
                since += 1
        return since >= self.spec.patience

    def is_better(self, score: float, than: float) -> bool:
        """Whether a metric is better than another, not only as good."""
        return score != than and self.feed.task.metric.reached(score, than)

    def is_best(self, position: Position, score: float) -> bool:
        """Whether no evaluation before was as good as this one."""
        best = position.best_metric
        return math.isfinite(score) and (best is None or math.isnan(best) or self.is_better(score, best))

    def milestone(self, samples: int, size: int) -> bool:
        """Whether the last `size` samples crossed a multiple of `evaluate_every` epochs."""
        interval = self.interval
        return interval is not None and samples // interval > (samples - size) // interval

    @property
    def interval(self) -> int | None:
        """Samples between two evaluations; None if there are none."""
        every = self.spec.evaluate_every
        return max(1, round(every * self.feed.order.n)) if every else None

    def evaluates(self, ending: Ending | None, samples: int, size: int) -> bool:
        """Whether an evaluation follows the last `size` samples: at a milestone, and at the end of a run."""
        return self.interval is not None and (ending == "finished" or self.milestone(samples, size))

    def restart_checkpoint_timer(self) -> None:
        """The next checkpoint is due `checkpoint_every` seconds from now."""
        self._saved = self.clock.seconds

    def add_loss(self, loss: float) -> None:
        """Add the loss of a step to the mean training loss of the next evaluation."""
        if math.isfinite(loss):
            self._losses.append(loss)

    def record_evaluation(self, position: Position, score: float, test_loss: float, seconds: float) -> None:
        """Enter an evaluation into the position and its curve; `seconds` is the training time before it."""
        metric, target = self.feed.task.metric, self.spec.target
        assert target is not None
        if not (math.isfinite(score) and math.isfinite(test_loss)):
            self.warn_not_finite(position, score, test_loss)
        position.metric = score if math.isfinite(score) else None
        if position.metric is not None and (
            position.best_metric is None
            or math.isnan(position.best_metric)  # in a checkpoint of version 0.1.0
            or metric.reached(position.metric, position.best_metric)
        ):
            position.best_metric = position.metric
        if position.target_samples is None and metric.reached(score, target):
            position.target_samples, position.target_seconds = position.samples, seconds
            position.target_steps = position.step
        point = Evaluation(
            step=position.step,
            samples=position.samples,
            seconds=round(seconds, 6),
            loss=sum(self._losses) / len(self._losses) if self._losses else None,
            metric=position.metric,
            test_loss=test_loss if math.isfinite(test_loss) else None,
            noise=self.noise_meter.since(),
        )
        position.curve.append(point.model_dump(exclude_none=True))
        self._losses.clear()

    def warn_not_finite(self, position: Position, score: float, test_loss: float) -> None:
        """Warn once that a result on the test set is not finite, and name the cause if it can be found."""
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
            callback.on_notice(f"{what} at step {position.step:,}: {why}")

    def previous_evaluation(self, position: Position) -> int:
        """Samples seen at the evaluation before the last one."""
        return int(position.curve[-2]["samples"]) if len(position.curve) > 1 else 0

    def diverged(self, position: Position, lr: float, since: int) -> DivergedError:
        """The error for a loss that is not finite; `since` is the position of the first suspect sample."""
        sample = bad_samples.in_training(self.feed, since, position.samples) if self.leads else ""
        if sample:
            why = f": {sample}"
        elif position.step == 1:
            why = ", before any update, and no sample is to blame: look at the model's outputs and the loss"
        else:
            why = f", with learning rate {lr:.4g}; try a smaller --lr or a longer warm-up"
        return DivergedError(
            f"the loss became {position.loss:g} at step {position.step:,} "
            f"({position.samples:,} samples seen){why}"
        )

    def end_message(self, position: Position) -> str | None:
        """The message of a run that has ended regularly, if there is something to say."""
        name = self.feed.task.metric.name
        if position.curve and position.metric is None:
            return f"the metric {name} is not a number"
        if self.patience_is_over(position):
            count = formatting.plural(self.spec.patience or 0, "evaluation")
            return f"ended early: {count} without a better {name}"
        return None

    def report_step(
        self,
        position: Position,
        epoch: int,
        lr: float,
        test_loss: float | None,
        worker: int | None = None,
        staleness: int | None = None,
    ) -> None:
        """Report the step that was just made to the callbacks."""
        if not self.callbacks:
            return
        record = StepRecord(
            step=position.step,
            epoch=epoch,
            samples=position.samples,
            loss=position.loss,
            lr=lr,
            seconds=self.clock.training_seconds,
            phases=self.clock.lap(),
            metric=None if test_loss is None else math.nan if position.metric is None else position.metric,
            test_loss=test_loss,
            worker=worker,
            staleness=staleness,
            synchronized=self.clock.exact,
        )
        for callback in self.callbacks:
            callback.on_step(record)


@dataclass(kw_only=True)
class Trainer(TrainingLoop):
    """The loop of synchronous workers.

    What depends on a clock or a signal is voted on, so that all workers do the same after the same step.
    Everything else follows from numbers that all workers have.
    """

    worker: Worker
    transport: Transport

    def run(self, position: Position) -> Ending:
        """Train from a position until something ends the run, and return what."""
        self.restart_checkpoint_timer()
        ending = self.ending(position, Votes())
        self.step_timer.begin(position.samples)
        with closing(self.feed.read(position.samples)) as reader:
            while ending is None:
                batch = next(reader)
                lr = self.schedule(position.samples)
                position.loss, votes, shared = self.worker.step(
                    batch.micro_batches, batch.size, lr, self.votes
                )
                position.step, position.samples = position.step + 1, position.samples + batch.size
                if shared and not math.isfinite(position.loss):
                    raise self.diverged(position, lr, position.samples - batch.size)
                self.add_loss(position.loss)
                ending = self.ending(position, votes)
                test_loss = None
                if self.evaluates(ending, position.samples, batch.size):
                    test_loss = self.evaluate(position)
                    if not (shared or math.isfinite(test_loss)):  # the test loss is the same at all workers
                        position.loss = test_loss
                        raise self.diverged(position, lr, self.previous_evaluation(position))
                    ending = ending or self.ending(position, votes)
                if ending in ("finished", "target"):
                    self.worker.finalize()
                self.report_step(position, batch.epoch, lr, test_loss)
                if ending is not None or votes.save:
                    with self.clock.phase("checkpoint"):
                        self.save(position)
                    self.restart_checkpoint_timer()
                self.step_timer.stepped(position.samples)
                if ending is None:
                    self.pauses.stepped(position.step, position.samples, shared)
        return ending

    def evaluate(self, position: Position) -> float:
        """Evaluate on the whole test set, enter the result into the position, and return the test loss."""
        seconds = self.clock.training_seconds
        with self.clock.phase("evaluation"), self.worker.consolidated():
            score, loss = evaluate(self.worker.model, self.feed, self.transport)
            if self.keep_best is not None and self.leads and self.is_best(position, score):
                self.keep_best(self.worker.model.state_dict())
        self.record_evaluation(position, score, loss, seconds)
        return loss
