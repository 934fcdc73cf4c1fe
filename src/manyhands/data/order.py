"""The global sample order: a pure function of (seed, epoch, position), whoever the workers are (law 3)."""

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

    Ours rather than a library's generator because a library may change its stream in any release, and an
    order that changes with an upgrade would break every resumed run.
    """
    with np.errstate(over="ignore"):
        z = values + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def key(*numbers: int) -> int:
    """One 64-bit number for several (seed, epoch, sample, ...): what is random about a sample starts here."""
    state = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        state = mix(state ^ mix(np.array([number & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)))
    return int(state[0])


@lru_cache(maxsize=2)
def shuffle(n: int, seed: int, epoch: int) -> Samples:
    """The epoch's permutation of n samples: sorted by a hash of (seed, epoch, sample)."""
    keys = mix(np.arange(n, dtype=np.uint64) ^ np.uint64(key(seed, epoch)))
    order = np.argsort(keys, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def split(samples: Samples, parts: int) -> list[Samples]:
    """Contiguous parts whose sizes differ by at most one; together they are the whole."""
    return [samples] if parts == 1 else list(np.array_split(samples, parts))


def sizes(total: int, parts: int) -> list[int]:
    """How many samples each of `split`'s parts has."""
    least, longer = divmod(total, parts)
    return [least + 1] * longer + [least] * (parts - longer)


@dataclass(frozen=True)
class Order:
    """The sequence of global batches of a run.

    An epoch is one shuffle of all samples, cut into batches; the last one is as small as what is left:

        position   0 ......... B ........ 2B ..... n | 0 ......... B
        epoch 0    [ batch 0 ][ batch 1  ][ ragged  ]|
        epoch 1                                      |[ batch 3 ]
    """

    n: int
    batch: int
    seed: int

    def batches(self, seen: int = 0) -> Iterator[Request]:
        """The global batches, without end, from the point where `seen` samples have been used."""
        epoch, position = divmod(seen, self.n)
        while True:
            order = shuffle(self.n, self.seed, epoch)
            while position < self.n:
                yield Request(epoch, order[position : position + self.batch])
                position += self.batch
            epoch, position = epoch + 1, 0

    def piece(self, seen: int, parts: int) -> int:
        """The end of the piece that begins at `seen` where every batch is cut into so many parts.

        The pieces of a batch are `split`'s: sizes differ by at most one. A run that goes on with another
        number of workers may begin inside a piece; then what is left of it is one.
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
        """These samples of the order; a piece never crosses the end of an epoch."""
        epoch, position = divmod(seen, self.n)
        return Request(epoch, shuffle(self.n, self.seed, epoch)[position : position + size])


def in_order(n: int, batch: int) -> Iterator[Request]:
    """Every sample once, unshuffled: how a test set is read."""
    for first in range(0, n, batch):
        yield Request(0, np.arange(first, min(first + batch, n), dtype=np.int64))


@dataclass(frozen=True)
class BatchShare:
    """One worker's part of every global batch, in micro-batches: `batch = workers x share x accumulated`."""

    rank: int = 0
    workers: int = 1
    accumulate: int = 1
    reads: bool = True  # false where another worker reads for this one

    def of(self, batch: Request) -> list[Request]:
        """This worker's micro-batches of a global batch; empty ones are left out."""
        if not self.reads:
            return []
        mine = split(batch.samples, self.workers)[self.rank]
        return [Request(batch.epoch, part) for part in split(mine, self.accumulate) if len(part)]
