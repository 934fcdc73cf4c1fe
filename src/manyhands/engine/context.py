"""Everything one rank computes with, built from a spec and its place: the same for training and measuring."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from manyhands.core import environment, registry
from manyhands.core.allocator import kept_memory
from manyhands.core.errors import UsageError
from manyhands.core.rank_info import STATUS, RankInfo, RankStatus
from manyhands.data.base import Batch, Request
from manyhands.data.order import BatchShare, Order, key
from manyhands.devices.device import Device, choose
from manyhands.engine.checkpoint.storage import random_state, restore_random_state
from manyhands.engine.fault_injection import faults
from manyhands.engine.fault_injection.faulty_compute import FaultyCompute, FaultyDataset, SlowedCompute
from manyhands.engine.fault_injection.faulty_transport import FaultyTransport
from manyhands.engine.feed import Feed, pooled
from manyhands.engine.noise_meter import MeteredCompute, NoiseScaleMeter
from manyhands.engine.position import Position
from manyhands.engine.recipe import make_recipe
from manyhands.engine.timing.clock import Clock
from manyhands.engine.timing.timed_compute import TimedCompute
from manyhands.engine.timing.traffic import CountingTransport
from manyhands.records.spec import RunSpec
from manyhands.strategies import STRATEGIES, options
from manyhands.strategies.aliases import refuse_views
from manyhands.strategies.asynchronous.base import Work
from manyhands.strategies.base import Compute, Setup
from manyhands.tasks import find
from manyhands.tasks.base import Task
from manyhands.tasks.contract import check_real
from manyhands.tasks.mean_loss import MeanLoss
from manyhands.transports.base import Transport
from manyhands.transports.connect import connect

if TYPE_CHECKING:
    from manyhands.offload.offloader import Offload

_EXCHANGING = ("communication", "wait")


class RankContext:
    """One rank's task, data, model, transport and strategy, and the clock that times them."""

    def __init__(
        self, info: RankInfo, spec: RunSpec, *, drill: bool = False, choices: Mapping[str, Any] | None = None
    ) -> None:
        self.info, self.spec, self.position = info, spec, Position()
        self.begun = False  # whether steps are made
        # what the strategy and the memory chose by themselves, or did the last time
        self.choices: dict[str, Any] = dict(choices or {})
        self.memory: Offload | None = None
        self.noise_meter = NoiseScaleMeter()
        self._steps = 0
        self.hardware = choose(spec.device, info.local_rank)
        self.device = self.hardware.where
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self.clock = Clock(self.hardware.synchronize if self.hardware.asynchronous else None)
        info.channel.watch(self.status)
        self._fault = faults.from_environment() if drill else None
        self._decoders = ExitStack()
        self.task = self._at_home(find.build(spec.task, spec.options), dtype)
        self.recipe = make_recipe(spec, self.task)
        assert spec.batch is not None
        order = Order(len(self.task.train), spec.batch, spec.seed)
        # the first stage reads, for its replica
        share = BatchShare(
            info.rank // spec.stages, spec.replicas, spec.micro_batches, info.rank % spec.stages == 0
        )
        self.free = STRATEGIES[spec.strategy].free
        tested = replace(self.task, loss=MeanLoss(self.task.loss))  # apart from the one that trains
        self.feed = Feed(tested, order, share, self.device, dtype, self.clock)
        self.horizon = self.feed.horizon(spec)
        self.schedule = self.recipe.schedule(self.update, order.n, self.horizon)
        self.traffic = CountingTransport(self._connect(), self.clock)
        self.transport: Transport = self.traffic
        try:
            self.worker = self._worker(dtype)
        except BaseException:
            self.close()
            raise

    @property
    def update(self) -> int:
        """Samples of one update, which decide its rate: the batch, or the piece that a worker claims."""
        spec = self.spec
        assert spec.batch is not None
        backup = spec.strategy_options.get("backup")
        if backup is not None:  # of a round that waits for all but the slowest
            return max(1, spec.batch * (spec.workers - int(backup)) // spec.workers)
        return max(1, spec.batch // spec.workers) if self.free else spec.batch

    @property
    def step(self) -> int:
        """Steps made so far: of the run, or of this worker where each goes at its own pace."""
        return self._steps if self.free else self.position.step

    def count(self) -> None:
        """This worker has made a step at its own pace."""
        self._steps += 1

    def begin(self) -> None:
        """From now on steps are made, and who stands still is stuck."""
        self.begun = True
        self.traffic.begin()
        if self.info.channel.status_slot is not None:
            self.clock.note = partial(self._write_down, self.info.channel.status_slot)

    def status(self) -> RankStatus:
        """What this rank is doing, for whoever looks after it; called from another thread."""
        if not self.begun:
            return RankStatus(self.step, "starting", "", self.clock.switches)
        return RankStatus(self.step, self.clock.current, self.traffic.current, self.clock.switches)

    def _write_down(self, board: memoryview) -> None:
        """Leave where it is found even if this process is killed: step, phase, and what it waits in."""
        phase = self.clock.current
        operation, calls = self.traffic.under_way if phase in _EXCHANGING else ("", 0)
        STATUS.pack_into(board, 0, self.step, calls, phase.encode(), operation.encode())

    def close(self) -> None:
        """Give back what the data sets, the transport and the memory hold."""
        self._decoders.close()
        self.transport.close()
        if self.memory is not None:
            self.memory.close()

    def _connect(self) -> Transport:
        spec, fault = self.spec, self._fault
        patience = {} if spec.timeout is None else {"timeout": max(60.0, 4 * spec.timeout)}
        transport = connect(spec.transport, self.info, device=self.device, **patience)
        return transport if fault is None else FaultyTransport(transport, fault, lambda: self.step)

    def _worker(self, dtype: torch.dtype) -> Any:
        """The strategy's worker around a model that is the same for the same seed, wherever it is built."""
        seed(self.spec.seed, self.hardware)
        model = self.task.model()
        check_real(model, f"the model of {self.task.name}")
        model = model.to(self.device, dtype)
        # on CUDA parameters stay where they are, or are cut
        if self.spec.strategy != "single" and self.device.type == "cpu":
            refuse_views(model)
        if self.info.rank:
            seed(key(self.spec.seed, self.info.rank), self.hardware)  # each worker drops out its own units
        strategy = registry.member("strategy", STRATEGIES, self.spec.strategy)
        spec = self.spec
        setup = Setup(
            model,
            self.recipe,
            self._gauged(self._compute(), model),
            self.transport,
            spec.sync_batchnorm,
            options.build(spec.strategy, spec.strategy_options),
            len(self.task.train),
            Work(self.feed.order, spec.workers, len(self.task.test), self.task.evaluation_batch),
            self.info.joining,
            self.feed.order.batch,
            self._example,
            self.choices,
        )
        return strategy(setup)

    def _example(self, size: int) -> Batch:
        """The first training samples, for measuring."""
        wanted = [Request(0, np.arange(min(size, len(self.task.train)), dtype=np.int64))]
        with closing(self.task.train.stream(wanted, self.spec.seed)) as stream:
            return self.feed.prepare(next(stream))

    def _compute(self) -> Compute:
        loss = MeanLoss(self.task.loss)
        compute = Compute(loss)
        if self.spec.offload != "none":
            from manyhands.offload.offloader import Offload

            spec = self.spec
            self.memory = Offload(
                spec.offload, spec.memory, spec.offload_to, self.choices, device=self.hardware
            )
            compute = Compute(loss, self.memory.run)
        if (factor := faults.slowness(self.info.rank)) > 1.0:
            compute = SlowedCompute(compute, factor)
        if self._fault is None:
            return TimedCompute(compute, self.clock)
        return FaultyCompute(compute, self.clock, self._due("backward"), self._fault)

    def _gauged(self, compute: Compute, model: nn.Module) -> Compute:
        """Told of every gradient, where somebody asked how noisy they are."""
        if not self.spec.noise_scale:
            return compute
        if self.device.type == "cuda" and self.spec.workers > 1:
            raise UsageError("--noise-scale looks at gradients that torch's DDP keeps to itself on CUDA")
        return MeteredCompute(compute, model, self.transport, self.noise_meter)

    def _due(self, where: faults.Where) -> Callable[[], bool]:
        fault = self._fault
        assert fault is not None
        return lambda: fault.due(self.info.rank, self.step, where)

    def _at_home(self, task: Task, dtype: torch.dtype) -> Task:
        """The task with its own modules on this device; the built task is shared and stays as it is."""
        check_real(task.preprocess, f"the preprocessing of {task.name}")
        task = replace(task, preprocess=copy.deepcopy(task.preprocess).to(self.device, dtype))
        task = pooled(task, self._decoders)
        if isinstance(task.loss, nn.Module):
            loss = copy.deepcopy(task.loss).to(self.device)
            task = replace(task, loss=loss.double() if dtype == torch.float64 else loss)
        if self._fault is not None:
            task = replace(task, train=FaultyDataset(task.train, self._due("data"), self._fault))
        return task


def threads_of(spec: RunSpec, info: RankInfo) -> int:
    """Threads a worker: what the user said, or an equal part of this host's cores."""
    return spec.threads or max(1, environment.cores() // len(info.peers_on_host))


@contextmanager
def own_state(threads: int, device: Device) -> Iterator[None]:
    """Device, threads, memory and random state are the worker's own while it works; then its process's again.

    The device comes first: nothing else may touch it before.
    """
    with device.taken():
        before = torch.get_num_threads()
        tensors, numbers = random_state(device)
        torch.set_num_threads(threads)
        try:
            with kept_memory():
                yield
        finally:
            torch.set_num_threads(before)
            restore_random_state(tensors, numbers, device)


def seed(number: int, device: Device) -> None:
    """Set every generator a task may draw from."""
    device.seed(number % 2**63)
    np.random.seed(number % 2**32)
    random.seed(number)
