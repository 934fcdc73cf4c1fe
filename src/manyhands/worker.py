"""What one worker does with a job: build everything from the spec, train, and leave a record.

It takes one picklable job and its place in the gang, so that any launcher can run it anywhere.
"""

from __future__ import annotations

import copy
import json
import math
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from manyhands import axes, environment
from manyhands.allocator import kept_memory
from manyhands.checkpoint import Checkpoint, Checkpoints, random_state, restore_random_state, separate
from manyhands.clock import Clock, training_phases
from manyhands.data.order import Order, Share
from manyhands.errors import DivergedError, InterruptedRunError, StorageError
from manyhands.feed import Feed
from manyhands.files import write_atomically
from manyhands.folder import Journal, RunFolder
from manyhands.launchers.base import Place
from manyhands.record import Observer, RunRecord, Start, Status
from manyhands.resolve import choose_device, make_recipe
from manyhands.spec import RunSpec
from manyhands.stopping import Stop
from manyhands.strategies import STRATEGIES
from manyhands.strategies.base import Compute, Setup, Timed, Worker
from manyhands.tasks import find
from manyhands.tasks.base import Task
from manyhands.trainer import Position, Trainer
from manyhands.transports import TRANSPORTS


@dataclass(frozen=True)
class Job:
    """What a worker is told: a resolved spec, the run's folder, and whether to go on from a checkpoint."""

    spec: RunSpec
    folder: Path
    resume: bool = False
    accept: frozenset[str] = frozenset()  # ids of other specs whose checkpoints are welcome


def work(place: Place, job: Job, observers: list[Observer]) -> RunRecord:
    """Be one worker of a run, from building the model to the record."""
    spec = job.spec
    threads = spec.threads or max(1, environment.cores() // spec.workers)
    with _own_torch_state(threads), kept_memory(), Stop() as stop:
        session = Session(place, job, observers, threads, stop)
        return session.run()


class Session:
    """One sitting of a run: built from a job, ended with a record."""

    def __init__(self, place: Place, job: Job, observers: list[Observer], threads: int, stop: Stop) -> None:
        spec = self.spec = job.spec
        self.folder = RunFolder(job.folder)
        self.device = choose_device(spec.device)
        self.environment = environment.describe(threads, str(self.device))
        self.journal = Journal(self.folder)
        self.observers: list[Observer] = [self.journal, *observers]
        self.checkpoints = Checkpoints(self.folder.checkpoints, spec.id, spec.keep)
        self.clock = Clock(torch.cuda.synchronize if self.device.type == "cuda" else None)
        self.task = _at_home(find.build(spec.task, spec.options), self.device, _dtype(spec))
        self.recipe = make_recipe(spec, self.task)
        assert spec.batch is not None
        order = Order(len(self.task.train), spec.batch, spec.seed)
        share = Share(place.rank, place.size, spec.accumulate)
        self.feed = Feed(self.task, order, share, self.device, _dtype(spec), self.clock)
        self.horizon = self.feed.horizon(spec)
        self.worker = self._worker()
        schedule = self.recipe.schedule(spec.batch, order.n, self.horizon)
        self.trainer = Trainer(
            spec, self.worker, schedule, self.feed, self.clock, self.observers, self._save, stop
        )
        self.here = self._position(job)

    def run(self) -> RunRecord:
        """Train, and write down how it ended, whichever way."""
        try:
            return self._run()
        except StorageError as error:
            raise StorageError(f"{error}; {self._how_to_go_on()}") from error
        finally:
            self.journal.close()

    def _run(self) -> RunRecord:
        self.folder.reopen(self.spec, self.environment)
        start = self._start()
        for observer in self.observers:
            observer.started(start)
        self.clock.start(self.clock.totals)  # what was built and opened until here is not training
        try:
            ending = self.trainer.run(self.here)
        except DivergedError as error:
            self.journal.flush()
            self._finish("diverged", str(error))
            raise
        with self.clock.phase("checkpoint"):
            self.journal.flush()
            if ending != "interrupted":
                self._write_model()
        if ending == "interrupted":
            number = self.trainer.stop.signal or signal.SIGINT
            name = signal.Signals(number).name
            message = f"interrupted by {name} at step {self.here.step:,}; {self._how_to_go_on()}"
            self._finish(ending, message)
            raise InterruptedRunError(message, number)
        return self._finish(ending)

    def _worker(self) -> Worker:
        """The strategy's worker around a model that is the same for the same seed, wherever it is built."""
        _seed(self.spec.seed)
        model = self.task.model().to(self.device, _dtype(self.spec))
        transport = axes.member("transport", TRANSPORTS, self.spec.transport)()
        strategy = axes.member("strategy", STRATEGIES, self.spec.strategy)
        compute = Timed(Compute(self.task.loss), self.clock)
        worker: Worker = strategy(Setup(model, self.recipe, compute, transport))
        return worker

    def _position(self, job: Job) -> Position:
        """Where to begin: at zero, or at the last good checkpoint."""
        saved = self.checkpoints.latest(self._say, job.accept) if job.resume else None
        if saved is None:
            if job.resume:
                self._say(f"{job.folder} has no checkpoint yet: starting from the beginning")
            self.folder.keep_steps(0)
            self.clock.start()
            return Position()
        here = Position(**saved.state["position"])
        here.resumed += 1
        self.worker.load_state(self._usable(saved))
        restore_random_state(saved.tensors, saved.state["random"])
        self.folder.keep_steps(here.step)
        self.clock.start(saved.state["clock"])
        if job.accept:
            self._save(here)  # from here on it is the changed spec's
        return here

    def _usable(self, saved: Checkpoint) -> dict[str, Tensor]:
        """A checkpoint's tensors, less those of an optimiser that is no longer used."""
        before, now = saved.state["optimizer"], self.recipe.optimizer
        if before == now:
            return saved.tensors
        self._say(f"the optimiser was {before} and is {now}: it begins without memory")
        return {name: tensor for name, tensor in saved.tensors.items() if not name.startswith("optimizer/")}

    def _save(self, here: Position) -> None:
        self.journal.flush()
        tensors, numbers = random_state()
        state = {
            "position": asdict(here),
            "clock": self.clock.totals,
            "random": numbers,
            "optimizer": self.recipe.optimizer,
        }
        self.checkpoints.save(here.step, {**self.worker.state(), **tensors}, state)

    def _write_model(self) -> None:
        tensors = separate(self.worker.model.state_dict())
        # one entry, because safetensors writes several in any order: the same run is the same file
        metadata = {"manyhands": json.dumps({"task": self.task.name, "run": self.spec.id})}
        write_atomically(self.folder.model, safetensors.torch.save(tensors, metadata))

    def _say(self, text: str) -> None:
        for observer in self.observers:
            observer.notice(text)

    def _how_to_go_on(self) -> str:
        steps = [int(path.stem.removeprefix("step-")) for path in self.checkpoints.paths()]
        last = f"the last checkpoint is of step {steps[-1]:,}" if steps else "there is no checkpoint yet"
        return f"{last}; continue with: manyhands train --resume {self.folder.path}"

    def _start(self) -> Start:
        here, task, environment_ = self.here, self.task, self.environment
        assert self.spec.target is not None
        return Start(
            run=str(self.folder.path),
            spec=self.spec,
            recipe_line=self._recipe_line(),
            parameters=sum(parameter.numel() for parameter in self.worker.model.parameters()),
            unit=task.unit,
            train_samples=len(task.train),
            horizon=min(self.horizon, self.spec.samples or self.horizon),
            threads=environment_.threads,
            device=environment_.device,
            metric_name=task.metric.name,
            target=self.spec.target,
            step=here.step,
            samples=here.samples,
            seconds=self.clock.training_seconds,
        )

    def _recipe_line(self) -> str:
        assert self.spec.batch is not None
        return self.recipe.describe(self.spec.batch, self.feed.order.n, self.horizon)

    def _finish(self, status: Status, message: str | None = None) -> RunRecord:
        """Write the record and tell everyone."""
        spec, here, start = self.spec, self.here, self._start()
        phases = self.clock.stopped()
        seconds, training = sum(phases.values()), sum(training_phases(phases).values())
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
            metric=here.metric,
            best_metric=here.best_metric,
            target=start.target,
            target_samples=here.target_samples,
            target_seconds=here.target_seconds,
            phases=[phases],
            peak_memory=environment.peak_memory(),
            resumed=here.resumed,
            environment=self.environment,
        )
        self.folder.write_record(record)
        for observer in self.observers:
            observer.ended(record)
        return record


@contextmanager
def _own_torch_state(threads: int) -> Iterator[None]:
    """Threads and random state are the worker's own while it works; then its process gets its own back."""
    before = torch.get_num_threads()
    tensors, numbers = random_state()
    deterministic = torch.backends.cudnn.deterministic
    torch.set_num_threads(threads)
    torch.backends.cudnn.deterministic = True  # law 6: a resumed run is bit-identical
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = deterministic
        torch.set_num_threads(before)
        restore_random_state(tensors, numbers)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _dtype(spec: RunSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def _at_home(task: Task, device: torch.device, dtype: torch.dtype) -> Task:
    """The task with its own preprocessing on this device; the built task is shared and stays as it is."""
    return replace(task, preprocess=copy.deepcopy(task.preprocess).to(device, dtype))
