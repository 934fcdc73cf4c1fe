"""Looks for samples with NaN or infinity, where a result is not finite."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing

import torch
from torch import Tensor

from manyhands.data import trees
from manyhands.data.base import Dataset, Request
from manyhands.data.order import in_order
from manyhands.engine.feed import Feed

TIME_LIMIT = 5.0  # seconds: a folder of images may be large


def in_training(feed: Feed, since: int, until: int) -> str:
    """Search the samples of the run from `since` to `until`: `sample 7 of the training set holds NaN ...`."""
    return _look(feed, feed.task.train, "training", _between(feed, since, until))


def in_test(feed: Feed) -> str:
    """Search the test set."""
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
    """The first bad sample in words; empty if none was found in time."""
    until, wanted = time.monotonic() + TIME_LIMIT, list(requests)
    with closing(data.stream(wanted, feed.order.seed)) as stream:
        for request, batch in zip(wanted, stream, strict=True):
            prepared = feed.prepare(batch).inputs
            held = {"inputs": batch.inputs, "targets": batch.targets, "preprocessed inputs": prepared}
            parts = ((name, leaf) for what, tree in held.items() for name, leaf in trees.named(tree, what))
            for what, leaf in parts:
                if isinstance(leaf, Tensor) and (row := _first(leaf)) is not None:
                    number, kind = int(request.samples[row[0]]), row[1]
                    return f"sample {number} of the {name} set holds {kind} in its {what}"
            feed.clock.switch(feed.clock.current)  # a sign of life: a long search is not a hang
            if time.monotonic() > until:
                break
    return ""


def _first(tensor: Tensor) -> tuple[int, str] | None:
    """The first row with a value that is not finite, and its kind."""
    if not tensor.is_floating_point() or not tensor.ndim:
        return None
    rows = tensor.isfinite().reshape(tensor.shape[0], -1).all(dim=1)
    if bool(rows.all()):
        return None
    row = int(rows.to(torch.uint8).argmin())
    return row, "NaN" if bool(tensor[row].isnan().any()) else "infinity"
