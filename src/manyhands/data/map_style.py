"""A map-style data set of torch: samples by index, put together by a `collate_fn`, decoded by a pool.

A sample must be a pure function of (seed, epoch, sample), whoever reads it and in whatever batch. So where
reading draws random numbers, from torch's, numpy's or Python's own generator, these are seeded for each
sample. Most data sets draw none, and seeding takes longer than to read a small sample; whether numbers were
drawn is seen from the generators, and a batch that drew some is read again, seeded.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import default_collate

from manyhands.core.errors import UsageError, kind_of
from manyhands.data import generators, trees
from manyhands.data.arrays import as_tensor
from manyhands.data.base import Batch, Dataset, Request
from manyhands.data.decoders import DecoderPool
from manyhands.data.generators import RandomStates
from manyhands.data.order import key
from manyhands.data.trees import Tree

TARGETS = ("labels", "label", "targets", "target")  # of a sample that is a dict


@dataclass(frozen=True, eq=False)
class MapData:
    """Any data set with `__len__` and `__getitem__`, such as torch's map-style ones.

    A sample is (input, target), a tuple whose last member is the target, or a dict that has it under
    "labels", "label", "targets" or "target". With `workers` processes, each worker of a run reads ahead.
    """

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] = default_collate
    workers: int = 0
    worker_init_fn: Callable[[int], None] | None = None
    notes: tuple[str, ...] = ()  # what a person should know, printed when a run starts
    _draws: list[bool] = field(default_factory=lambda: [False], init=False, repr=False)

    def __len__(self) -> int:
        return len(self.dataset)

    def stream(self, requests: Iterable[Request], seed: int) -> Generator[Batch, None, None]:
        """Read each request in this process."""
        for request in requests:
            yield self.read(request, seed)

    @contextmanager
    def pooled(self) -> Iterator[Dataset]:
        """A data set that is read by processes of its own, which end with the context."""
        if not self.workers:
            yield self
            return
        with DecoderPool(self.workers, self.read, self.worker_init_fn) as pool:
            yield _Pooled(len(self), pool)

    def read(self, request: Request, seed: int) -> Batch:
        """One batch. The generators of the process stay as they are."""
        before = RandomStates.now()
        if not self._draws[0]:
            batch = self.collate_fn(self._samples(request.samples.tolist()))
            if before.unchanged:
                return as_batch(batch)
            self._draws[0] = True
            before.restore()
        try:
            samples = []
            for sample in request.samples.tolist():
                generators.seed(key(seed, request.epoch, sample))
                samples += self._samples([sample])
            first = int(request.samples[0]) if len(request.samples) else 0
            generators.seed(key(seed, request.epoch, first, 1))  # a collate_fn may draw too
            return as_batch(self.collate_fn(samples))
        finally:
            before.restore()

    def _samples(self, indices: list[int]) -> list[Any]:
        several = getattr(self.dataset, "__getitems__", None)  # torch's own loader asks for it too
        if callable(several):
            return list(several(indices))
        return [self.dataset[index] for index in indices]


@dataclass(frozen=True)
class _Pooled:
    """A data set whose requests are answered by a pool."""

    length: int
    pool: DecoderPool

    def __len__(self) -> int:
        return self.length

    def stream(self, requests: Iterable[Request], seed: int) -> Generator[Batch, None, None]:
        return self.pool.stream(requests, seed)


def as_batch(collated: Any) -> Batch:
    """Inputs and targets of what a `collate_fn` or a table has returned."""
    inputs, targets = (collated.inputs, collated.targets) if isinstance(collated, Batch) else _parts(collated)
    return Batch(
        *(trees.each(_as_tensor(name), tree) for name, tree in (("inputs", inputs), ("targets", targets)))
    )


def _parts(collated: Any) -> tuple[Tree, Tree]:
    if isinstance(collated, Mapping):
        names = [name for name in TARGETS if name in collated]
        if len(names) != 1:
            found = " and ".join(names) or f"only {', '.join(map(str, collated))}"
            raise UsageError(
                f"a sample that is a dict must have its target under one of {', '.join(TARGETS)}, but has "
                f"{found}: rename it, or use a collate_fn that returns (inputs, targets)"
            )
        return {name: value for name, value in collated.items() if name not in names}, collated[names[0]]
    if isinstance(collated, tuple | list) and len(collated) >= 2:
        *inputs, targets = collated
        return (inputs[0] if len(inputs) == 1 else tuple(inputs)), targets
    raise UsageError(
        f"a sample must be (input, target), but a batch of them is {kind_of(collated)}: use a "
        "collate_fn that returns (inputs, targets)"
    )


def _as_tensor(name: str) -> Callable[[object], object]:
    def convert(value: object) -> object:
        found = as_tensor(value)
        if isinstance(found, torch.Tensor) or found is None:
            return found
        if isinstance(found, bool | int | float):
            return torch.tensor([found])
        raise UsageError(
            f"the {name} of a batch hold {kind_of(found)}, not a tensor: turn it into numbers in the "
            "data set or in its collate_fn"
        )

    return convert
