"""The record of a run, put together at rank 0 from what every rank reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from torch import nn

from manyhands.core import environment
from manyhands.engine.async_loop import AsyncTrainer
from manyhands.engine.context import RankContext
from manyhands.engine.job import Job
from manyhands.engine.loop import Trainer
from manyhands.engine.position import Position
from manyhands.engine.recipe import changes
from manyhands.engine.timing.step_timer import timeline
from manyhands.records.phases import PAUSED, Span, training_phases
from manyhands.records.record import Evaluation, RunRecord, Start, Status, StepTimes, WorkShare
from manyhands.records.spec import RunSpec
from manyhands.tasks.model_parts import batch_norms


class RankReport(NamedTuple):
    """What rank 0 needs from every rank for the record."""

    phases: dict[str, float]
    peak_memory: int
    memory: int  # before the first checkpoint
    host_memory: int
    traffic: dict[str, dict[str, float]]
    share: WorkShare
    step_times: StepTimes | None
    samples_per_second: float | None  # between its own steps, without the first
    traced: list[list[Span]]
    skipped_steps: int = 0


def describe_start(
    context: RankContext, job: Job, position: Position, machine: environment.Environment
) -> Start:
    """What is known of a run before its first step."""
    spec, task = context.spec, context.task
    assert spec.target is not None
    return Start(
        run=str(job.folder),
        spec=spec,
        recipe_line=context.recipe.describe(
            context.update,
            context.feed.order.n,
            context.horizon,
            where="" if context.update == spec.batch else f"for each update of {context.update:,}",
        ),
        recipe_changes=changes(spec, task),
        parameters=sum(parameter.numel() for parameter in context.worker.model.parameters()),
        unit=task.unit,
        train_samples=len(task.train),
        horizon=min(context.horizon, spec.samples or context.horizon),
        threads=machine.threads,
        device=machine.device,
        metric_name=task.metric.name,
        target=spec.target,
        step=position.step,
        samples=position.samples,
        seconds=context.clock.training_seconds,
        one_worker=job.one_worker,
    )


def report_rank(
    context: RankContext, trainer: Trainer | AsyncTrainer, position: Position, training_memory: int
) -> RankReport:
    """What this rank reports; `training_memory` is its peak before the first checkpoint, 0 without one."""
    hardware, step_timer = context.hardware, trainer.step_timer
    hardware.synchronize()  # work that the device still has to do is a part of the run
    peak = hardware.most()
    return RankReport(
        phases=_phases(context.clock.stopped(), trainer.pauses.seconds_missed),
        peak_memory=peak,
        memory=training_memory or peak,
        host_memory=environment.peak_memory(),
        traffic={name: asdict(each) for name, each in context.traffic.traffic.items()},
        share=WorkShare(samples=context.feed.read_so_far, steps=position.step),
        step_times=step_timer.step_times,
        samples_per_second=step_timer.samples_per_second,
        traced=step_timer.traced,
        skipped_steps=context.precision.skipped,
    )


def _phases(spent: dict[str, float], missed: float) -> dict[str, float]:
    """Seconds by phase without pauses, also those that a rank without steps took for waiting."""
    running = {name: seconds for name, seconds in spent.items() if name != PAUSED}
    idle = max(training_phases(running), key=running.__getitem__)
    return {**running, idle: max(0.0, running[idle] - missed)}


def make_record(
    context: RankContext,
    trainer: Trainer | AsyncTrainer,
    position: Position,
    start: Start,
    machine: environment.Environment,
    reports: Sequence[RankReport | None],
    status: Status,
    message: str | None,
    random: bool,
) -> RunRecord:
    """The record, from the reports by rank: the first is rank 0's own, None is a rank that was lost.

    `random` says that training drew random numbers besides the order of the samples, such as dropout's.
    """
    present = [report for report in reports if report is not None]
    own, hardware, task = present[0], context.hardware, context.task
    keeper = trainer.keeper if isinstance(trainer, AsyncTrainer) else None
    seconds, training = sum(own.phases.values()), sum(training_phases(own.phases).values())
    of_device = hardware.memory_of == "device"
    return RunRecord(
        id=start.spec.id,
        run=start.run,
        status=status,
        message=message,
        spec=start.spec,
        recipe=context.recipe.to_dict(),
        recipe_line=start.whole_recipe,
        parameters=start.parameters,
        unit=start.unit,
        train_samples=start.train_samples,
        test_samples=len(task.test),
        steps=position.step,
        samples=position.samples,
        epochs=position.samples / start.train_samples,
        seconds=seconds,
        training_seconds=training,
        samples_per_second=position.samples / training if training > 0 else 0.0,
        loss=position.loss if math.isfinite(position.loss) else None,
        metric_name=start.metric_name,
        higher_is_better=task.metric.higher_is_better,
        metric=position.metric,
        best_metric=position.best_metric,
        target=start.target,
        target_samples=position.target_samples,
        target_seconds=position.target_seconds,
        target_steps=position.target_steps,
        curve=[Evaluation(**point) for point in position.curve],
        phases=[report.phases if report else {} for report in reports],
        traffic=[report.traffic if report else {} for report in reports],
        hosts=list(context.info.hosts),
        shares=keeper.shares if keeper else [report.share for report in present],
        staleness=dict(sorted(keeper.staleness.items())) if keeper else {},
        lost=keeper.lost if keeper else [],
        peak_memory=max(report.peak_memory for report in present),
        memory=[report.memory if report else 0 for report in reports],
        memory_of=hardware.memory_of,
        host_memory=max(report.host_memory for report in present) if of_device else None,
        step_times=[report.step_times if report else None for report in reports],
        steady_samples_per_second=_throughput(start.spec, trainer, reports),
        timeline=timeline(
            [report.traced if report else [] for report in reports],
            list(context.info.hosts),
            together=keeper is None,
        ),
        noise=context.noise_meter.noise,
        choices=context.choices,
        resumed=position.resumed,
        environment=machine,
        skipped_steps=_skipped(start.spec, present),
        split_matters=random or _normalizes_shares(context.worker.model, start.spec),
    )


def _skipped(spec: RunSpec, reports: Sequence[RankReport]) -> int:
    """Steps whose update was skipped; workers that do not update together skip for themselves."""
    apart = spec.traits.asynchronous or spec.traits.averaging
    return sum(report.skipped_steps for report in reports) if apart else reports[0].skipped_steps


def _normalizes_shares(model: nn.Module, spec: RunSpec) -> bool:
    """Whether a batch norm sees only a worker's share of each batch."""
    return not spec.sync_batchnorm and bool(batch_norms(model))


def _throughput(
    spec: RunSpec, trainer: Trainer | AsyncTrainer, reports: Sequence[RankReport | None]
) -> float | None:
    """Samples per second of all workers, without the first steps.

    Asynchronous workers are measured one by one, each between the ends of its own steps: rank 0 reads updates
    only at its own step ends, so work that others had begun before its first mark would count as done after.
    Where a worker was lost, or gradients of rounds were dropped, only rank 0 knows what counted.
    """
    if not isinstance(trainer, AsyncTrainer) or trainer.keeper is None:
        return trainer.step_timer.samples_per_second
    of_workers = reports[spec.servers :]
    rates = [each.samples_per_second for each in of_workers if each is not None]
    if len(rates) < len(of_workers) or None in rates or trainer.keeper.lost or spec.round_workers is not None:
        return trainer.keeper.step_timer.samples_per_second
    return sum(rate for rate in rates if rate is not None)
