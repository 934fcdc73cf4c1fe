"""The conformance suite of tasks: subclass it and set `task`."""

from __future__ import annotations

import copy
from itertools import islice
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from manyhands.data.base import Batch, Dataset, Request
from manyhands.data.order import Order, in_order
from manyhands.tasks.base import Task


class TaskSuite:
    """Contract tests of a task."""

    task: ClassVar[Task]
    few = 8  # samples, enough for every check

    def outputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Outputs of a seeded model in double precision and evaluation mode, and the targets."""
        torch.manual_seed(0)
        model = self.task.build(torch.float64).double().eval()
        inputs = copy.deepcopy(self.task.preprocess).double()(batch.inputs)
        return model(inputs.double() if inputs.is_floating_point() else inputs), batch.targets

    def read(self, data: Dataset, samples: list[int], *, epoch: int = 0, seed: int = 0) -> Batch:
        """Some samples of a data set."""
        (batch,) = data.stream([Request(epoch, np.array(samples, dtype=np.int64))], seed)
        return batch

    def first(self) -> list[int]:
        """The indices of the first few samples."""
        return list(range(min(self.few, len(self.task.train))))

    def test_the_loss_is_a_mean_over_samples(self) -> None:
        """Law 4: a global mean can be computed from uneven parts."""
        outputs, targets = self.outputs(self.read(self.task.train, self.first()))
        whole = self.task.loss(outputs, targets)
        middle = 1 + len(targets) // 3
        parts = [(outputs[:middle], targets[:middle]), (outputs[middle:], targets[middle:])]
        mean = sum(self.task.loss(o, t) * (len(t) / len(targets)) for o, t in parts if len(t))
        torch.testing.assert_close(mean, whole, rtol=1e-12, atol=1e-12)

    def test_the_metric_scores_each_sample(self) -> None:
        """One finite number per sample."""
        outputs, targets = self.outputs(self.read(self.task.test, self.first()))
        scores = self.task.metric.scores(outputs, targets)
        assert scores.shape == targets.shape[:1]
        assert torch.isfinite(scores.double()).all()

    def test_the_loss_has_gradients_for_every_parameter(self) -> None:
        """The forward pass uses all parameters."""
        torch.manual_seed(0)
        model = self.task.build()
        batch = self.read(self.task.train, self.first())
        inputs = copy.deepcopy(self.task.preprocess).float()(batch.inputs)
        inputs = inputs.float() if inputs.is_floating_point() else inputs
        self.task.loss(model(inputs), batch.targets).backward()
        assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []

    def test_the_same_seed_builds_the_same_model(self) -> None:
        """Every rank builds its own model, and all are equal."""
        states = []
        for _ in range(2):
            torch.manual_seed(7)
            states.append(self.task.build().state_dict())
        for name, tensor in states[0].items():
            assert torch.equal(tensor, states[1][name]), name

    def test_a_sample_does_not_depend_on_its_batch(self) -> None:
        """Reading is a pure function of (seed, epoch, sample)."""
        first = self.first()
        together = self.read(self.task.train, first, epoch=2, seed=5)
        for index, sample in enumerate(first):
            alone = self.read(self.task.train, [sample], epoch=2, seed=5)
            assert torch.equal(alone.inputs[0], together.inputs[index])
            assert torch.equal(alone.targets[0], together.targets[index])

    def test_streams_answer_requests_in_order(self) -> None:
        """Batches come in the order of the requests, although they are read ahead."""
        n = len(self.task.train)
        requests = list(islice(Order(n, max(1, n // 50), seed=3).batches(), 3))
        for request, batch in zip(requests, self.task.train.stream(requests, 3), strict=True):
            expected = self.read(self.task.train, request.samples.tolist(), epoch=request.epoch, seed=3)
            assert torch.equal(batch.inputs, expected.inputs)
            assert torch.equal(batch.targets, expected.targets)

    def test_the_test_set_is_never_augmented(self) -> None:
        """Evaluation does not depend on the seed and the epoch."""
        request = next(iter(in_order(len(self.task.test), self.few))).samples.tolist()
        once = self.read(self.task.test, request, epoch=0, seed=0)
        again = self.read(self.task.test, request, epoch=4, seed=9)
        assert torch.equal(once.inputs, again.inputs)
