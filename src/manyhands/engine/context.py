"""Everything that one rank computes with, built from a spec: the same for training and for measuring."""

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
from manyhands.data.call import call
from manyhands.data.order import BatchShare, Order, key
from manyhands.devices.device import Device, choose
from manyhands.engine import initial_weights
from manyhands.engine.checkpoint.storage import random_state, restore_random_state
from manyhands.engine.compiled import CompiledCalls
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
from manyhands.strategies.asynchronous.base import AsynchronousSetup, Work
from manyhands.strategies.base import Compute, PartitionedSetup, Setup
from manyhands.strategies.precision import precision_of
from manyhands.tasks import find, keras_model
from manyhands.tasks.base import Task
from manyhands.tasks.checked_loss import CheckedLoss
from manyhands.tasks.contract import check_real
from manyhands.transports.base import Transport
from manyhands.transports.connect import connect

if TYPE_CHECKING:
    from manyhands.offload.offloader import Offload

_EXCHANGING = ("communication", "wait")


class RankContext:
    """One rank's task, data, model, transport and strategy, and the clock that times them.

    spec ─▶ device, clock ─▶ task ─▶ recipe, feed ─▶ transport ─▶ the strategy's worker ─▶ schedule
    """

    def __init__(
        self,
        info: RankInfo,
        spec: RunSpec,
        *,
        inject_faults: bool = False,
        choices: Mapping[str, Any] | None = None,
    ) -> None:
        self.info, self.spec, self.position = info, spec, Position()
        self.asynchronous = spec.traits.asynchronous
        # what the strategy and offloading chose by themselves, now or in an earlier session
        self.choices: dict[str, Any] = dict(choices or {})
        self.begun = False  # whether training has begun
        self._steps = 0  # of this worker, where workers do not step together
        self._fault = faults.from_environment() if inject_faults else None
        self.noise_meter = NoiseScaleMeter()
        self.offload: Offload | None = None
        self._until_closed = ExitStack()

        self.hardware = choose(spec.device, info.local_rank)
        self.device = self.hardware.where
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self.precision = precision_of(spec.precision, self.device)
        self.clock = Clock(self.hardware.synchronize if self.hardware.asynchronous else None)
        info.channel.watch(self.status)

        built = find.build(spec.task, spec.options)
        self.data_notes = [note for data in (built.train, built.test) for note in getattr(data, "notes", ())]
        self.task = self._on_device(built, dtype)
        self.recipe = make_recipe(spec, self.task)
        self.feed = self._make_feed(dtype)
        self.horizon = self.feed.horizon(spec)

        self.traffic = CountingTransport(self._connect(), self.clock)
        self.transport: Transport = self.traffic
        try:
            self.worker = self._worker(dtype)
            if dtype == torch.float64:
                self._until_closed.enter_context(keras_model.float64())  # also for losses that Keras computes
            self.schedule = self.recipe.schedule(self.update, self.feed.order.n, self.horizon)
        except BaseException:
            self.close()
            raise

    @property
    def update(self) -> int:
        """Samples per update, which decide its learning rate: the batch, or what one worker leases."""
        spec = self.spec
        assert spec.batch is not None
        if spec.round_workers is not None:
            return max(1, spec.batch * spec.round_workers // spec.workers)
        return max(1, spec.batch // spec.workers) if self.asynchronous else spec.batch

    @property
    def step(self) -> int:
        """Steps so far: of the run, or of this worker where workers do not step together."""
        return self._steps if self.asynchronous else self.position.step

    def count(self) -> None:
        """Count a step of this worker, where workers do not step together."""
        self._steps += 1

    def begin(self) -> None:
        """Training begins: from now on a rank that does not move is stuck."""
        self.begun = True
        self.traffic.begin()
        if self.info.channel.status_slot is not None:
            self.clock.note = partial(self._write_status, self.info.channel.status_slot)

    def status(self) -> RankStatus:
        """What this rank is doing, for its supervisor; called from another thread."""
        if not self.begun:
            return RankStatus(self.step, "starting", "", self.clock.switches)
        return RankStatus(self.step, self.clock.current, self.traffic.current, self.clock.switches)

    def _write_status(self, board: memoryview) -> None:
        """Write step, phase and operation to shared memory, where they outlive this process."""
        phase = self.clock.current
        operation, calls = self.traffic.under_way if phase in _EXCHANGING else ("", 0)
        STATUS.pack_into(board, 0, self.step, calls, phase.encode(), operation.encode())

    def close(self) -> None:
        """Release what data sets, transport and offloading hold."""
        self._until_closed.close()
        self.transport.close()
        if self.offload is not None:
            self.offload.close()

    def _connect(self) -> Transport:
        spec, fault = self.spec, self._fault
        timeout = {} if spec.timeout is None else {"timeout": max(60.0, 4 * spec.timeout)}
        transport = connect(spec.transport, self.info, device=self.device, **timeout)
        return transport if fault is None else FaultyTransport(transport, fault, lambda: self.step)

    def _worker(self, dtype: torch.dtype) -> Any:
        """The strategy's worker around a model that is the same for the same seed, wherever it is built."""
        seed(self.spec.seed, self.hardware)
        model = self.task.build(dtype)
        check_real(model, f"the model of {self.task.name}")
        if self.spec.init is not None:
            initial_weights.load(model, self.spec.init)
        model = model.to(self.device, dtype)
        # on CUDA parameters stay where they are, or are cut
        if not self.spec.traits.one_worker and self.device.type == "cpu":
            refuse_views(model)
        if self.info.rank:
            seed(key(self.spec.seed, self.info.rank), self.hardware)  # each worker drops out its own units
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.recipe = self.recipe.bound(trained, self.update)
        strategy = registry.member("strategy", STRATEGIES, self.spec.strategy)
        return strategy(self._setup(model))

    def _setup(self, model: nn.Module) -> Setup:
        """What the strategy needs: workers that do not step together lease work, others divide a model."""
        spec = self.spec
        compute = self._gauged(self._compute(), model)
        chosen = options.build(spec.strategy, spec.strategy_options)
        if self.asynchronous:
            return AsynchronousSetup(
                model=model,
                recipe=self.recipe,
                compute=compute,
                transport=self.transport,
                options=chosen,
                work=Work(self.feed.order, spec.workers, len(self.task.test), self.task.evaluation_batch),
                joining=self.info.joining,
            )
        return PartitionedSetup(
            model=model,
            recipe=self.recipe,
            compute=compute,
            transport=self.transport,
            options=chosen,
            sync_batchnorm=spec.sync_batchnorm,
            epoch=self.feed.order.n,
            batch=self.feed.order.batch,
            example=self._example,
            choices=self.choices,
        )

    def _example(self, size: int) -> Batch:
        """The first training samples, for measuring."""
        wanted = [Request(0, np.arange(min(size, len(self.task.train)), dtype=np.int64))]
        with closing(self.task.train.stream(wanted, self.spec.seed)) as stream:
            return self.feed.prepare(next(stream))

    def _compute(self) -> Compute:
        loss = CheckedLoss(self.task.loss)
        compute = Compute(loss, CompiledCalls() if self.spec.compile else call, self.precision)
        if self.spec.offload != "none":
            from manyhands.offload.offloader import Offload

            spec = self.spec
            self.offload = Offload(
                spec.offload, spec.memory, spec.offload_to, self.choices, device=self.hardware
            )
            compute = Compute(loss, self.offload.run, self.precision)
        if (factor := faults.slowness(self.info.rank)) > 1.0:
            compute = SlowedCompute(compute, factor)
        if self._fault is None:
            return TimedCompute(compute, self.clock)
        return FaultyCompute(compute, self.clock, self._due("backward"), self._fault)

    def _gauged(self, compute: Compute, model: nn.Module) -> Compute:
        """A compute whose gradients are measured, with --noise-scale."""
        if not self.spec.noise_scale:
            return compute
        if self.device.type == "cuda" and self.spec.workers > 1:
            raise UsageError("--noise-scale looks at gradients that torch's DDP keeps to itself on CUDA")
        return MeteredCompute(compute, model, self.transport, self.noise_meter)

    def _due(self, where: faults.Where) -> Callable[[], bool]:
        fault = self._fault
        assert fault is not None
        return lambda: fault.due(self.info.rank, self.step, where)

    def _make_feed(self, dtype: torch.dtype) -> Feed:
        """This rank's part of the data; of a pipeline's stages, the first one reads for its replica."""
        spec, info, task = self.spec, self.info, self.task
        assert spec.batch is not None
        order = Order.of(len(task.train), spec.batch, spec.seed, drop_last=spec.drop_last)
        share = BatchShare(
            info.rank // spec.stages, spec.replicas, spec.micro_batches, info.rank % spec.stages == 0
        )
        evaluated = replace(task, loss=CheckedLoss(task.loss))  # another object than the loss that trains
        return Feed(evaluated, order, share, self.device, dtype, self.clock, self.precision.autocast)

    def _on_device(self, task: Task, dtype: torch.dtype) -> Task:
        """The task with copies of its modules on this device; the built task is shared and not changed."""
        check_real(task.preprocess, f"the preprocessing of {task.name}")
        task = replace(task, preprocess=copy.deepcopy(task.preprocess).to(self.device, dtype))
        task = pooled(task, self._until_closed)
        if isinstance(task.loss, nn.Module):
            loss = copy.deepcopy(task.loss).to(self.device)
            task = replace(task, loss=loss.double() if dtype == torch.float64 else loss)
        if self._fault is not None:
            task = replace(task, train=FaultyDataset(task.train, self._due("data"), self._fault))
        return task


def threads_of(spec: RunSpec, info: RankInfo) -> int:
    """Threads per worker: what the user set, or an equal share of this host's cores."""
    return spec.threads or max(1, environment.cores() // len(info.peers_on_host))


@contextmanager
def own_state(threads: int, device: Device) -> Iterator[None]:
    """Set the worker's device, threads, allocator and random state, and restore the process's own afterwards.

    The device comes first: nothing else may touch it before.
    """
    with device.taken():
        threads_before = torch.get_num_threads()
        tensors, numbers = random_state(device)
        torch.set_num_threads(threads)
        try:
            with kept_memory():
                yield
        finally:
            torch.set_num_threads(threads_before)
            restore_random_state(tensors, numbers, device)


def seed(number: int, device: Device) -> None:
    """Seed every generator that a task may use."""
    device.seed(number % 2**63)
    np.random.seed(number % 2**32)
    random.seed(number)
