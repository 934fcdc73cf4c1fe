"""Where a result that is not a number comes from: is there a sample that is none either?"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing

import torch
from torch import Tensor

from manyhands.data.base import Dataset, Request
from manyhands.data.order import in_order
from manyhands.engine.feed import Feed

PATIENCE = 5.0  # seconds: a folder of images may be long


def in_training(feed: Feed, since: int, until: int) -> str:
    """Among the samples of the run from `since` to `until`: `sample 7 of the training set holds NaN ...`."""
    return _look(feed, feed.task.train, "training", _between(feed, since, until))


def in_test(feed: Feed) -> str:
    """Among the test set's."""
    task = feed.task
    return _look(feed, task.test, "test", in_order(len(task.test), task.evaluation_batch))


def _between(feed: Feed, since: int, until: int) -> Iterator[Request]:
    for request in feed.order.batches(since):
        if since >= until:
            return
        yield Request(request.epoch, request.samples[: until - since])
        since += len(request.samples)


@torch.inference_mode()
def _look(feed: Feed, data: Dataset, name: str, requests: Iterable[Request]) -> str:
    """Empty where there is none, or none was found in time."""
    until, wanted = time.monotonic() + PATIENCE, list(requests)
    with closing(data.stream(wanted, feed.order.seed)) as stream:
        for request, batch in zip(wanted, stream, strict=True):
            prepared = feed.prepare(batch).inputs
            held = {"inputs": batch.inputs, "targets": batch.targets, "preprocessed inputs": prepared}
            for what, tensor in held.items():
                if (row := _first(tensor)) is not None:
                    number, kind = int(request.samples[row[0]]), row[1]
                    return f"sample {number} of the {name} set holds {kind} in its {what}"
            feed.clock.switch(feed.clock.current)  # a long look is no hang
            if time.monotonic() > until:
                break
    return ""


def _first(tensor: Tensor) -> tuple[int, str] | None:
    """The first row with something that is no number, and what that is."""
    if not tensor.is_floating_point():
        return None
    rows = tensor.isfinite().reshape(tensor.shape[0], -1).all(dim=1)
    if bool(rows.all()):
        return None
    row = int(rows.to(torch.uint8).argmin())
    return row, "NaN" if bool(tensor[row].isnan().any()) else "infinity"
