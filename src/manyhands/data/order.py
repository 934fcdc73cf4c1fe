"""The global sample order: a pure function of (seed, epoch, position), for any workers (law 3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from manyhands.data.base import Request, Samples

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64: integers in, well-mixed integers out.

    We do not use a library's generator, because its stream may change with any release, and a changed order
    would break every resumed run.
    """
    with np.errstate(over="ignore"):
        z = values + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def key(*numbers: int) -> int:
    """One 64-bit seed from several numbers (seed, epoch, sample, ...)."""
    state = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        state = mix(state ^ mix(np.array([number & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)))
    return int(state[0])


@lru_cache(maxsize=2)
def shuffle(n: int, seed: int, epoch: int) -> Samples:
    """The permutation of n samples in an epoch: sorted by a hash of (seed, epoch, sample)."""
    keys = mix(np.arange(n, dtype=np.uint64) ^ np.uint64(key(seed, epoch)))
    order = np.argsort(keys, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def split(samples: Samples, parts: int) -> list[Samples]:
    """Divide into contiguous parts whose sizes differ by at most one."""
    return [samples] if parts == 1 else list(np.array_split(samples, parts))


def sizes(total: int, parts: int) -> list[int]:
    """The sizes of the parts that `split` makes."""
    least, longer = divmod(total, parts)
    return [least + 1] * longer + [least] * (parts - longer)


@dataclass(frozen=True)
class Order:
    """The sequence of global batches of a run.

    An epoch is one shuffle of all samples, divided into batches. The last one may be smaller:

        position   0 ......... B ........ 2B ..... n | 0 ......... B
        epoch 0    [ batch 0 ][ batch 1  ][ ragged  ]|
        epoch 1                                      |[ batch 3 ]
    """

    n: int  # samples per epoch
    batch: int
    seed: int
    samples_in_all: int | None = None  # more than n if the last short batch of each epoch is left out

    @classmethod
    def of(cls, samples: int, batch: int, seed: int, *, drop_last: bool = False) -> Order:
        """The order of this many samples; without the last batch of an epoch if it is short and dropped."""
        if drop_last and samples % batch:
            return cls(samples - samples % batch, batch, seed, samples)
        return cls(samples, batch, seed)

    def shuffled(self, epoch: int) -> Samples:
        """The samples of an epoch, each at most once. Which of them are left out changes with the epoch."""
        return shuffle(self.samples_in_all or self.n, self.seed, epoch)[: self.n]

    def batches(self, seen: int = 0) -> Iterator[Request]:
        """The endless sequence of global batches, after `seen` samples."""
        epoch, position = divmod(seen, self.n)
        while True:
            order = self.shuffled(epoch)
            while position < self.n:
                yield Request(epoch, order[position : position + self.batch])
                position += self.batch
            epoch, position = epoch + 1, 0

    def piece(self, seen: int, parts: int) -> int:
        """The end of the piece that begins at `seen`, if every batch is divided into `parts` pieces.

        The pieces of a batch are those of `split`. A run that is resumed with another number of workers may
        begin inside a piece; then the rest of that piece is the first one.
        """
        epoch, position = divmod(seen, self.n)
        first = position // self.batch * self.batch
        size = min(self.batch, self.n - first)
        least, longer = divmod(size, parts)
        within = position - first
        border = longer * (least + 1)
        if within < border:
            end = (within // (least + 1) + 1) * (least + 1)
        else:
            end = border + ((within - border) // least + 1) * least
        return epoch * self.n + first + end

    def samples(self, seen: int, size: int) -> Request:
        """The `size` samples after `seen`. They must be in one epoch."""
        epoch, position = divmod(seen, self.n)
        return Request(epoch, self.shuffled(epoch)[position : position + size])


def in_order(n: int, batch: int) -> Iterator[Request]:
    """Every sample once, unshuffled, as a test set is read."""
    for first in range(0, n, batch):
        yield Request(0, np.arange(first, min(first + batch, n), dtype=np.int64))


@dataclass(frozen=True)
class BatchShare:
    """One worker's share of every global batch, in micro-batches: `batch = workers x share x accumulated`."""

    rank: int = 0
    workers: int = 1
    accumulate: int = 1
    reads: bool = True  # false if another worker reads for this one

    def of(self, batch: Request) -> list[Request]:
        """This worker's micro-batches of a global batch, without empty ones."""
        if not self.reads:
            return []
        mine = split(batch.samples, self.workers)[self.rank]
        return [Request(batch.epoch, part) for part in split(mine, self.accumulate) if len(part)]
