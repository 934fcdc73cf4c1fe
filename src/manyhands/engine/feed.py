"""The data of one worker: its micro-batches of each global batch, prepared for its device; the test set."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.data.base import Batch, Dataset, Pooled, Request
from manyhands.data.call import call
from manyhands.data.order import BatchShare, Order, in_order, split
from manyhands.engine.timing.clock import Clock
from manyhands.records.spec import RunSpec
from manyhands.tasks.base import Task
from manyhands.tasks.contract import scored
from manyhands.tasks.prepare import prepare
from manyhands.transports.base import Collectives


class GlobalBatch(NamedTuple):
    """The samples of one step over all workers; this worker's part is read while it is iterated."""

    epoch: int
    size: int
    micro_batches: Iterator[Batch]


@dataclass(frozen=True)
class Feed:
    """Reads a task's data for one worker."""

    task: Task
    order: Order
    share: BatchShare
    device: torch.device
    dtype: torch.dtype
    clock: Clock
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext  # the precision of evaluations
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def read_so_far(self) -> int:
        """Samples that this worker has read."""
        return self.counts["samples"]

    def read(self, seen: int) -> Generator[GlobalBatch, None, None]:
        """The global batches after the first `seen` samples, without end."""
        wanted = (part for batch in self.order.batches(seen) for part in self.share.of(batch))
        with closing(self.task.train.stream(wanted, self.order.seed)) as stream:
            for batch in self.order.batches(seen):
                parts = islice(stream, len(self.share.of(batch)))
                yield GlobalBatch(batch.epoch, len(batch.samples), self._timed(parts))

    def piece(self, seen: int, size: int) -> Iterator[Batch]:
        """The samples of a lease, in micro-batches."""
        request = self.order.samples(seen, size)
        parts = [Request(request.epoch, part) for part in split(request.samples, self.share.accumulate)]
        wanted = [part for part in parts if len(part.samples)]
        with closing(self.task.train.stream(wanted, self.order.seed)) as stream:
            yield from self._timed(stream)

    def horizon(self, spec: RunSpec) -> int:
        """The samples in the epochs of a run."""
        assert spec.epochs is not None
        return max(1, round(spec.epochs * self.order.n))

    def prepare(self, batch: Batch) -> Batch:
        """The batch on this worker's device, preprocessed, in the dtype of the run."""
        return prepare(self.task, batch, self.device, self.dtype)

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            with self.clock.phase("data"):
                batch = next(batches, None)
                if batch is None:
                    return
                batch = self.prepare(batch)
                self.counts["samples"] += batch.size
            yield batch


def pooled(task: Task, until: ExitStack) -> Task:
    """The task with data sets whose decoders live until the stack is closed, not only for one stream."""

    def kept(dataset: Dataset) -> Dataset:
        return until.enter_context(dataset.pooled()) if isinstance(dataset, Pooled) else dataset

    return replace(task, train=kept(task.train), test=kept(task.test))


@torch.inference_mode()
def evaluate(model: nn.Module, feed: Feed, transport: Collectives) -> tuple[float, float]:
    """The mean score and the mean loss over the test set; each worker evaluates its part."""
    task, total = feed.task, len(feed.task.test)
    share = BatchShare(transport.rank, transport.size)
    mine = (part for request in in_order(total, task.evaluation_batch) for part in share.of(request))
    sums = test_sums(model, feed, mine)
    score, loss, weight = transport.all_reduce(sums.to(feed.device)).tolist()
    return score / total, mean_loss(loss, weight)


def mean_loss(total: float, weight: float) -> float:
    """The mean of losses; NaN if none of them counts."""
    return total / weight if weight else math.nan


@torch.inference_mode()
def test_sums(model: nn.Module, feed: Feed, requests: Iterable[Request]) -> Tensor:
    """The sums of scores, of losses and of their weights over some samples of the test set."""
    task = feed.task
    sums = torch.zeros(3, dtype=torch.float64)
    # some modules may be in eval mode already
    modes = [(m, m.training) for part in (model, task.preprocess) for m in part.modules()]
    model.eval()
    task.preprocess.eval()
    with closing(task.test.stream(requests, seed=0)) as stream:
        for raw in stream:
            batch = feed.prepare(raw)
            with feed.autocast():
                outputs = call(model, batch.inputs)
                score = scored(task.metric, outputs, batch.targets, batch.size).sum(dtype=torch.float64)
                loss = task.loss(outputs, batch.targets)
            total, weight = (loss.double() * batch.size, batch.size) if isinstance(loss, Tensor) else loss
            found = (score, *(torch.as_tensor(value).to(score) for value in (total, weight)))
            sums += torch.stack(found).cpu()
            feed.clock.switch(feed.clock.current)  # a sign of life: a long evaluation is not a hang
    for module, training in modes:
        module.training = training
    return sums
