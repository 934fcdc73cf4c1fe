"""What one worker does with a job: build everything from the spec, train, and leave a record.

It takes one picklable job and its place in the gang, so that any launcher can run it anywhere. All ranks
train; rank 0 also writes the run's folder and tells its parent what happens.
"""

from __future__ import annotations

import json
import math
import signal
from dataclasses import asdict
from typing import Any, NamedTuple

import safetensors.torch

from manyhands.callbacks.base import Callback
from manyhands.callbacks.journal import Journal
from manyhands.callbacks.relay import Relay
from manyhands.core import environment
from manyhands.core.atomic_files import write_atomically
from manyhands.core.errors import DivergedError, InterruptedRunError, StorageError
from manyhands.core.rank_info import RankInfo
from manyhands.core.signals import StopRequest
from manyhands.devices import device
from manyhands.engine.async_loop import AsyncTrainer
from manyhands.engine.checkpoint.resume import (
    all_loaded,
    choose,
    how_to_go_on,
    random_name,
    restore_generators,
)
from manyhands.engine.checkpoint.saved_state import read
from manyhands.engine.checkpoint.storage import Checkpoints, random_state, separate
from manyhands.engine.checkpoint.tensor_checks import plainly_named
from manyhands.engine.context import RankContext, own_state, threads_of
from manyhands.engine.job import Job
from manyhands.engine.loop import Trainer
from manyhands.engine.position import Position
from manyhands.engine.timing.step_timer import timeline
from manyhands.records.phases import Span, training_phases
from manyhands.records.record import (
    Evaluation,
    RunRecord,
    Start,
    Status,
    StepTimes,
    WorkShare,
)
from manyhands.records.run_folder import RunFolder
from manyhands.strategies import STRATEGIES
from manyhands.tasks import find


def work(info: RankInfo, job: Job) -> RunRecord | None:
    """Be one worker of a run, from building the model to the record, which is rank 0's to return."""
    threads = threads_of(job.spec, info)
    hardware = device.choose(job.spec.device, info.local_rank)
    with own_state(threads, hardware), StopRequest() as stop, find.no_exit(job.spec.task):
        return Session(info, job, threads, stop).run()


class Report(NamedTuple):
    """What rank 0 needs to know of every rank for the record."""

    phases: dict[str, float]
    peak_memory: int
    memory: int  # before the first checkpoint
    host_memory: int
    traffic: dict[str, dict[str, float]]
    share: WorkShare
    step_times: StepTimes | None
    traced: list[list[Span]]


class Session:
    """One sitting of a run: built from a job, ended with a record."""

    def __init__(self, info: RankInfo, job: Job, threads: int, stop: StopRequest) -> None:
        spec = self.spec = job.spec
        self.info, self.job, self.leads = info, job, info.rank == 0
        self.folder = RunFolder(job.folder)
        self.journal = Journal(self.folder)
        self.callbacks: list[Callback] = [self.journal, Relay(info.channel)] if self.leads else []
        self.checkpoints = Checkpoints(self.folder.checkpoints, spec.id, spec.keep)
        self.stop, self._memory = stop, 0
        context = self.context = RankContext(
            info,
            spec,
            drill=job.attempt == 0 and not info.joining,
            choices=self.folder.choices() if job.resume and self.leads else {},
        )
        self.environment = environment.describe(threads, str(context.device))
        self.clock, self.task, self.recipe, self.feed = (
            context.clock,
            context.task,
            context.recipe,
            context.feed,
        )
        course: dict[str, Any] = {
            "spec": spec,
            "schedule": context.schedule,
            "feed": context.feed,
            "clock": context.clock,
            "callbacks": self.callbacks,
            "save": self._save,
            "asked_to_stop": lambda: self._signal is not None,
            "leads": self.leads,
            "worker": context.worker,
            "noise_meter": context.noise_meter,
        }
        self.trainer: Trainer | AsyncTrainer = (
            AsyncTrainer(**course, gone=lambda: info.channel.gone, count=context.count)
            if context.free
            else Trainer(**course, transport=context.transport)
        )
        self.here = self._position()

    def run(self) -> RunRecord | None:
        """Train, and write down how it ended, whichever way."""
        try:
            return self._run()
        except StorageError as error:
            raise StorageError(f"{error}; {how_to_go_on(self.folder)}") from error
        finally:
            self.journal.close()
            self.context.close()

    def _run(self) -> RunRecord | None:
        if self.leads:
            self.folder.reopen(self.spec, self.environment)
            self.folder.write_choices(self.context.choices)
        start = self._start()
        for callback in self.callbacks:
            callback.on_start(start)
        if self.spec.workers > 1 and self.recipe.momentum and not STRATEGIES[self.spec.strategy].momentum:
            self._say(
                f"momentum {self.recipe.momentum:g} with {self.spec.strategy}: each worker repeats gradients "
                "of its own past, which the others have acted upon since, and asynchrony acts like momentum "
                "by itself; where the loss does not fall, leave it out"
            )
        if "cut" in self.context.choices:
            self._say(self.context.choices["cut"])
        if self.info.joining:
            self.info.channel.joined()
            self.info.channel.tell(("on_notice", f"worker {self.info.rank} has joined"))
        self.context.begin()
        self.clock.start(self.clock.totals)  # what was built and opened until here is not training
        try:
            ending = self.trainer.run(self.here)
        except DivergedError as error:
            self.journal.flush()
            if self._finish("diverged", str(error)) is None:
                return None  # one sentence is enough, and rank 0 says it
            raise
        with self.clock.phase("checkpoint"):
            self.journal.flush()
            if ending != "interrupted" and self.leads:
                self._write_model()
        if ending != "interrupted":
            return self._finish(ending, self.trainer.doubt(self.here))
        number = self._signal or signal.SIGTERM
        name = signal.Signals(number).name
        message = f"interrupted by {name} at step {self.here.step:,}; {how_to_go_on(self.folder)}"
        if self._finish(ending, message) is None:
            return None
        raise InterruptedRunError(message, number)

    @property
    def _signal(self) -> int | None:
        return self.stop.signal or self.info.channel.stop

    def _position(self) -> Position:
        """Where to begin: at zero, or at the last good checkpoint."""
        job = self.job
        if self.info.joining:  # the others know where they are
            self.clock.start()
            return self.context.position
        saved = None
        if job.resume:
            saved = choose(self.context, self.folder, self.checkpoints, job.accept, self._say)
        if saved is None:
            if job.resume:
                self._say(f"{job.folder} has no checkpoint yet: starting from the beginning")
            if self.leads:
                self.folder.keep_steps(0)
            self.clock.start()
            return self.context.position
        numbers = read(saved.state)
        here = numbers.position
        here.resumed += 1
        self.context.position = here
        self.context.worker.load_state(saved.tensors)
        restore_generators(saved, numbers, self.context)
        all_loaded(self.info, here.step)  # a resume that fails leaves the folder as it was
        if self.leads:
            self.folder.keep_steps(here.step)
        self.clock.start(numbers.clock if self.leads or not self.context.free else None)
        if job.accept and (self.leads or not self.context.free):
            self._save(here)  # from here on it is the changed spec's
        return here

    def _save(self, here: Position) -> None:
        self.journal.flush()
        hardware = self.context.hardware
        self._memory = self._memory or hardware.most()  # a checkpoint takes more than training does
        state = self.context.worker.state()  # all ranks put it together, rank 0 writes it
        # where each goes at its own pace no two runs are alike, and only rank 0 is here
        own = random_state(hardware)
        randoms = [own] if self.context.free else self.info.channel.exchange(own)
        if not self.leads:
            return
        tensors = {
            random_name(name, rank): tensor
            for rank, (held, _) in enumerate(randoms)
            for name, tensor in held.items()
        }
        numbers = {
            "position": asdict(here),
            "clock": self.clock.totals,
            "random": [numbers for _, numbers in randoms],
            "optimizer": self.recipe.optimizer,
        }
        self.checkpoints.save(here.step, {**plainly_named(state), **tensors}, numbers)

    def _write_model(self) -> None:
        tensors = separate(plainly_named(self.context.worker.model.state_dict()))
        # one entry, because safetensors writes several in any order: the same run is the same file
        metadata = {"manyhands": json.dumps({"task": self.task.name, "run": self.spec.id})}
        write_atomically(self.folder.model, safetensors.torch.save(tensors, metadata))

    def _say(self, text: str) -> None:
        for callback in self.callbacks:
            callback.on_notice(text)

    def _start(self) -> Start:
        here, task, environment_ = self.here, self.task, self.environment
        assert self.spec.target is not None
        return Start(
            run=str(self.folder.path),
            spec=self.spec,
            recipe_line=self._recipe_line(),
            parameters=sum(parameter.numel() for parameter in self.context.worker.model.parameters()),
            unit=task.unit,
            train_samples=len(task.train),
            horizon=min(self.context.horizon, self.spec.samples or self.context.horizon),
            threads=environment_.threads,
            device=environment_.device,
            metric_name=task.metric.name,
            target=self.spec.target,
            step=here.step,
            samples=here.samples,
            seconds=self.clock.training_seconds,
            one_worker=self.job.one_worker,
        )

    def _recipe_line(self) -> str:
        assert self.spec.batch is not None
        return self.recipe.describe(self.context.update, self.feed.order.n, self.context.horizon)

    def _finish(self, status: Status, message: str | None = None) -> RunRecord | None:
        """Write the record and tell everyone; None at all ranks but 0, which only report to it."""
        spec, here, start = self.spec, self.here, self._start()
        traffic = {name: asdict(each) for name, each in self.context.traffic.traffic.items()}
        share = WorkShare(samples=self.feed.read_so_far, steps=here.step)
        hardware, step_timer = self.context.hardware, self.trainer.step_timer
        hardware.synchronize()  # what it still has to do is a part of the run
        peak = (hardware.most(), self._memory or hardware.most(), environment.peak_memory())
        mine = Report(self.clock.stopped(), *peak, traffic, share, step_timer.step_times, step_timer.traced)
        reports: list[Report | None] = self.info.channel.exchange(mine)
        if not self.leads:
            return None
        known = [report for report in reports if report is not None]
        keeper = self.trainer.keeper if isinstance(self.trainer, AsyncTrainer) else None
        seconds, training = sum(mine.phases.values()), sum(training_phases(mine.phases).values())
        record = RunRecord(
            id=spec.id,
            run=start.run,
            status=status,
            message=message,
            spec=spec,
            recipe=self.recipe.to_dict(),
            recipe_line=start.recipe_line,
            parameters=start.parameters,
            unit=start.unit,
            train_samples=start.train_samples,
            test_samples=len(self.task.test),
            steps=here.step,
            samples=here.samples,
            epochs=here.samples / start.train_samples,
            seconds=seconds,
            training_seconds=training,
            samples_per_second=here.samples / training if training > 0 else 0.0,
            loss=here.loss if math.isfinite(here.loss) else None,
            metric_name=start.metric_name,
            higher_is_better=self.task.metric.higher_is_better,
            metric=here.metric,
            best_metric=here.best_metric,
            target=start.target,
            target_samples=here.target_samples,
            target_seconds=here.target_seconds,
            target_steps=here.target_steps,
            curve=[Evaluation(**point) for point in here.curve],
            phases=[report.phases if report else {} for report in reports],
            traffic=[report.traffic if report else {} for report in reports],
            hosts=list(self.info.hosts),
            shares=keeper.shares if keeper else [report.share for report in known],
            staleness=dict(sorted(keeper.staleness.items())) if keeper else {},
            lost=keeper.lost if keeper else [],
            peak_memory=max(report.peak_memory for report in known),
            memory=[report.memory if report else 0 for report in reports],
            memory_of=hardware.memory_of,
            host_memory=max(r.host_memory for r in known) if hardware.memory_of == "device" else None,
            step_times=[report.step_times if report else None for report in reports],
            steady_samples_per_second=(keeper.step_timer if keeper else step_timer).samples_per_second,
            timeline=timeline(
                [report.traced if report else [] for report in reports],
                list(self.info.hosts),
                together=keeper is None,
            ),
            noise=self.context.noise_meter.noise,
            choices=self.context.choices,
            resumed=here.resumed,
            environment=self.environment,
        )
        self.folder.write_record(record)
        for callback in self.callbacks:
            callback.on_end(record)
        return record
