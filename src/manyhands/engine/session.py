"""What one worker does with a job: build everything from the spec, train, and leave a record.

A worker takes one picklable job and its rank info, so that any launcher can run it anywhere. All ranks train;
rank 0 also writes the run's folder and reports to the parent process.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import safetensors.torch
from torch import Tensor

from manyhands.callbacks.base import Callback
from manyhands.callbacks.journal import Journal
from manyhands.callbacks.relay import Relay
from manyhands.core import environment, formatting
from manyhands.core.atomic_files import write_atomically
from manyhands.core.errors import DivergedError, InterruptedRunError, StorageError
from manyhands.core.rank_info import ENOUGH, RankInfo
from manyhands.core.signals import StopRequest
from manyhands.devices import device
from manyhands.engine.async_loop import AsyncTrainer
from manyhands.engine.checkpoint.resume import (
    all_loaded,
    choose,
    how_to_continue,
    random_name,
    restore_generators,
)
from manyhands.engine.checkpoint.saved_state import read
from manyhands.engine.checkpoint.storage import Checkpoints, random_state, separate
from manyhands.engine.checkpoint.tensor_checks import plainly_named
from manyhands.engine.context import RankContext, own_state, threads_of
from manyhands.engine.job import Job
from manyhands.engine.loop import Trainer
from manyhands.engine.pauses import Pauses, pauses_of
from manyhands.engine.position import Position
from manyhands.engine.run_record import RankReport, describe_start, make_record, report_rank
from manyhands.records.record import RunRecord, Start, Status
from manyhands.records.run_folder import RunFolder
from manyhands.strategies import STRATEGIES
from manyhands.tasks import find


def work(info: RankInfo, job: Job) -> RunRecord | None:
    """Be one worker of a run, from building the model to the record, which rank 0 returns."""
    threads = threads_of(job.spec, info)
    hardware = device.choose(job.spec.device, info.local_rank)
    with own_state(threads, hardware), StopRequest() as stop, find.no_exit(job.spec.task):
        return Session(info, job, threads, stop).run()


class Session:
    """One session of a run: built from a job, ended with a record. A resumed run has several."""

    def __init__(self, info: RankInfo, job: Job, threads: int, stop: StopRequest) -> None:
        self.info, self.job, self.spec, self.leads = info, job, job.spec, info.rank == 0
        self.folder = RunFolder(job.folder)
        self.journal = Journal(self.folder)
        self.callbacks: list[Callback] = [self.journal, Relay(info.channel)] if self.leads else []
        self.checkpoints = Checkpoints(self.folder.checkpoints, self.spec.id, self.spec.keep)
        self._stop = stop
        self._training_memory = 0  # bytes at the first checkpoint
        self.context = RankContext(
            info,
            self.spec,
            inject_faults=job.attempt == 0 and not info.joining,
            choices=self.folder.choices() if job.resume and self.leads else {},
        )
        self.clock = self.context.clock
        self.environment = environment.describe(threads, str(self.context.device))
        self.trainer = make_trainer(
            self.context,
            self.callbacks,
            self._save,
            lambda: self._signal is not None,
            lambda: info.channel.stop == ENOUGH,
            self._write_best if self.spec.keep_best else None,
            pauses_of(job, info.rank, self.clock, together=not self.context.asynchronous),
        )
        self.position = self._first_position()

    def run(self) -> RunRecord | None:
        """Train, and write a record however training ended."""
        try:
            return self._run()
        except StorageError as error:
            raise StorageError(f"{error}; {how_to_continue(self.folder)}") from error
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
        self._give_advice()
        if self.info.joining:
            self.info.channel.joined()
            self.info.channel.tell(("on_notice", f"worker {self.info.rank} has joined"))
        self.context.begin()
        self.clock.start(self.clock.totals)  # building and opening is not training
        self._random_before = self._random_state()
        try:
            ending = self.trainer.run(self.position)
        except DivergedError as error:
            self.journal.flush()
            if self._finish("diverged", str(error)) is None:
                return None  # rank 0 raises it for all
            raise
        with self.clock.phase("checkpoint"):
            self.journal.flush()
            if ending != "interrupted" and self.leads:
                self._write_tensors(self.folder.model, self.context.worker.model.state_dict())
        if ending != "interrupted":
            return self._finish(ending, self.trainer.end_message(self.position))
        number = self._signal or signal.SIGTERM
        name = signal.Signals(number).name
        message = f"interrupted by {name} at step {self.position.step:,}; {how_to_continue(self.folder)}"
        if self._finish(ending, message) is None:
            return None
        raise InterruptedRunError(message, number)

    @property
    def _signal(self) -> int | None:
        return self._stop.signal or self.info.channel.stop or None  # ENOUGH is not a signal

    def _give_advice(self) -> None:
        """Notices about settings that often disappoint, and about what a strategy chose."""
        momentum = self.context.recipe.momentum
        if self.spec.workers > 1 and momentum and not STRATEGIES[self.spec.strategy].momentum:
            self._notify(
                f"momentum {momentum:g} with {self.spec.strategy}: momentum adds old gradients to updates "
                "that are already based on old parameters, and asynchrony itself acts like momentum; if the "
                "loss does not fall, try --set recipe.momentum=0"
            )
        if left_out := self.context.recipe.left_out:
            count = formatting.plural(len(left_out), "parameter")
            listed = formatting.first_few(left_out)
            self._notify(f"the optimizer of the recipe does not get {count}, which will not change: {listed}")
        if "cut" in self.context.choices:
            self._notify(self.context.choices["cut"])
        for note in self.context.data_notes:
            self._notify(note)

    def _first_position(self) -> Position:
        """Where to begin: at zero, or at the last good checkpoint."""
        job = self.job
        if self.info.joining:  # the other workers know where they are
            self.clock.start()
            return self.context.position
        saved = None
        if job.resume:
            saved = choose(self.context, self.folder, self.checkpoints, job.accept, self._notify)
        if saved is None:
            if job.resume:
                self._notify(f"{job.folder} has no checkpoint yet: starting from the beginning")
            if self.leads:
                self.folder.keep_steps(0)
            self.clock.start()
            return self.context.position
        state = read(saved.state)
        position = self.context.position = state.position
        position.resumed += 1
        self.context.worker.load_state(saved.tensors)
        restore_generators(saved, state, self.context)
        self.context.precision.load_state(state.precision_of(self.info.rank))
        all_loaded(self.info, position.step)  # a resume that fails leaves the folder as it was
        if self.leads:
            self.folder.keep_steps(position.step)
        saves = self.leads or not self.context.asynchronous
        self.clock.start(state.clock if saves else None)
        if job.accept and saves:
            self._save(position)  # from here on the checkpoints belong to the changed spec
        return position

    def _save(self, position: Position) -> None:
        self.journal.flush()
        hardware = self.context.hardware
        self._training_memory = self._training_memory or hardware.most()  # a checkpoint takes more
        state = self.context.worker.state()  # all ranks put it together, rank 0 writes it
        # asynchronous runs are not repeatable, and only rank 0 comes here
        own = (*random_state(hardware), self.context.precision.state())
        ranks = [own] if self.context.asynchronous else self.info.channel.exchange(own)
        if not self.leads:
            return
        tensors = {
            random_name(name, rank): tensor
            for rank, (held, _, _) in enumerate(ranks)
            for name, tensor in held.items()
        }
        plain_state = {
            "position": asdict(position),
            "clock": self.clock.totals,
            "random": [numbers for _, numbers, _ in ranks],
            "optimizer": self.context.recipe.saved_as,
        }
        if any(precision for *_, precision in ranks):
            plain_state["precision"] = [precision for *_, precision in ranks]
        self.checkpoints.save(position.step, {**plainly_named(state), **tensors}, plain_state)

    def _write_best(self, tensors: dict[str, Tensor]) -> None:
        self._write_tensors(self.folder.best, tensors)

    def _write_tensors(self, file: Path, tensors: dict[str, Tensor]) -> None:
        # one entry, because safetensors writes several in any order: the same run is the same file
        metadata = {"manyhands": json.dumps({"task": self.context.task.name, "run": self.spec.id})}
        write_atomically(file, safetensors.torch.save(separate(plainly_named(tensors)), metadata))

    def _random_state(self) -> tuple[bytes, str]:
        """The state of the generators: it changes where a model or its data draw random numbers."""
        tensors, numbers = random_state(self.context.hardware)
        return b"".join(tensors[name].cpu().numpy().tobytes() for name in sorted(tensors)), repr(numbers)

    def _notify(self, text: str) -> None:
        for callback in self.callbacks:
            callback.on_notice(text)

    def _start(self) -> Start:
        return describe_start(self.context, self.job, self.position, self.environment)

    def _finish(self, status: Status, message: str | None = None) -> RunRecord | None:
        """Write the record at rank 0 and tell the callbacks; the other ranks report to it and return None."""
        start = self._start()
        mine = report_rank(self.context, self.trainer, self.position, self._training_memory)
        reports: list[RankReport | None] = self.info.channel.exchange(mine)
        if not self.leads:
            return None
        record = make_record(
            *(self.context, self.trainer, self.position, start, self.environment, reports, status, message),
            random=self._random_state() != self._random_before,
        )
        self.folder.write_record(record)
        for callback in self.callbacks:
            callback.on_end(record)
        return record


def make_trainer(
    context: RankContext,
    callbacks: list[Callback],
    save: Callable[[Position], None],
    asked_to_stop: Callable[[], bool],
    asked_to_end: Callable[[], bool],
    keep_best: Callable[[dict[str, Tensor]], None] | None,
    pauses: Pauses,
) -> Trainer | AsyncTrainer:
    """The loop of the context's strategy: workers step together, or they do not."""
    own = (
        partial(
            AsyncTrainer,
            worker=context.worker,
            gone=lambda: context.info.channel.gone,
            count=context.count,
        )
        if context.asynchronous
        else partial(Trainer, worker=context.worker, transport=context.transport)
    )
    return own(
        spec=context.spec,
        schedule=context.schedule,
        feed=context.feed,
        clock=context.clock,
        callbacks=callbacks,
        save=save,
        asked_to_stop=asked_to_stop,
        asked_to_end=asked_to_end,
        keep_best=keep_best,
        leads=context.info.rank == 0,
        pauses=pauses,
        noise_meter=context.noise_meter,
    )
