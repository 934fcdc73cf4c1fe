"""Which rank has leased which samples: each sample exactly once per epoch, at any speeds (law 3).

The whole queue is numbers in one piece of memory, so that a server can keep it to itself and workers of one
host can share it. Callers of a method hold the lock, or are the only ones that may write.

    order    ........ done ........ [ leased by 1 ][ by 0 ][ by 2 ] ..... not yet leased .....  | sync point
                                                                   ^ taken                      ^ until

Nothing is leased beyond a sync point. When everything before it is done, no gradient is in flight: the model
is evaluated, saved, or finished. The lease of a worker that is gone goes to another worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from manyhands.data.order import Order


class LeaseKind(IntEnum):
    """What a worker should do."""

    LATER = 0  # nothing now: ask again
    TRAIN = 1
    TEST = 2
    OVER = 3  # leave


class QueueStage(IntEnum):
    """What all workers are doing."""

    TRAIN = 0
    TEST = 1
    SAVE = 2
    OVER = 3


class Lease(NamedTuple):
    """Samples for one worker: from a position of the order, or of the test set."""

    kind: LeaseKind
    start: int = 0
    size: int = 0
    stage: QueueStage = QueueStage.TRAIN


class Update(NamedTuple):
    """The result of a leased piece: one entry of the log."""

    step: int  # of all workers, 1 is the first
    samples: int  # done so far, these included
    start: int
    size: int
    loss: float
    lr: float
    worker: int
    staleness: int  # updates between reading the parameters and writing them; -1: kept for a later push


class EvaluationSums(NamedTuple):
    """Sums over samples of the test set."""

    score: float
    loss: float
    weight: float  # of the losses: the number of samples, unless the loss has weights of its own


_LOG = 4096  # updates that may wait to be read
_HEAD = 16
(_STAGE, _TAKEN, _UNTIL, _TESTED, _UPDATES, _PIECES, _SAMPLES, _LOGGED, _READ, _RETURNED) = range(10)
_WRITER = 10  # the rank that is changing the queue, counted from 1; it stays if that rank was killed
_ROW = 9
(_KIND, _START, _SIZE, _STEPS, _DONE, _DROPPED, _PRESENT, _VERSION, _PROGRESS) = range(9)
_RETURN = 3  # kind, start, size
_SUM = 3  # score, loss, weight
_UNDO = _HEAD + _ROW + _SUM


@final
class WorkQueue:
    """The numbers of the queue, and the operations on them."""

    def __init__(self, memory: npt.NDArray[np.uint8], ranks: int, order: Order, parts: int) -> None:
        """`memory` is zeroed, of `size(ranks)` bytes; a global batch is divided into `parts` pieces."""
        self._order, self._parts, self.ranks = order, parts, ranks
        numbers = memory[: self.size(ranks)].view(np.int64)
        borders = np.cumsum([_HEAD, _ROW * ranks, _RETURN * 2 * ranks, _SUM * ranks, _UNDO])
        self._head, rows, returned, sums, undo, log = np.split(numbers, borders)
        self._rows, self._returned = rows.reshape(ranks, _ROW), returned.reshape(2 * ranks, _RETURN)
        self._sums = sums.view(np.float64).reshape(ranks, _SUM)
        self._undo = undo[:_HEAD], undo[_HEAD:-_SUM], undo[-_SUM:].view(np.float64)
        self._log = log.view(np.float64).reshape(_LOG, len(Update._fields))

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes of memory that a queue needs."""
        return 8 * (_HEAD + (_ROW + 2 * _RETURN + _SUM) * ranks + _UNDO + _LOG * len(Update._fields))

    @contextmanager
    def changing(self, rank: int) -> Iterator[None]:
        """Inside, this rank changes shared numbers; if it is killed there, the next rank undoes the change.

        Half a lease would be samples that are never used; half an update would use some of them twice.
        """
        head, (before, row, sums) = self._head, self._undo
        if head[_WRITER]:
            last = head[_WRITER] - 1
            self._rows[last], self._sums[last] = row, sums
            head[:_WRITER] = before[:_WRITER]
            head[_WRITER] = 0
        before[:], row[:], sums[:] = head, self._rows[rank], self._sums[rank]
        head[_WRITER] = rank + 1
        yield
        head[_WRITER] = 0

    # ---- for workers

    def enter(self, rank: int) -> None:
        """This rank works from now on; one that joins late starts level with the slowest.

        If an earlier process of this rank still holds a lease, it goes back to the queue.
        """
        self.put_back(rank)
        self._rows[rank, _PROGRESS] = self._slowest()
        self._rows[rank, _KIND] = LeaseKind.LATER
        self._rows[rank, _PRESENT] = 1

    def lease(self, rank: int, test_size: int, tests: int, bound: int | None = None) -> Lease:
        """The next piece for this rank, which has none."""
        stage = QueueStage(self._head[_STAGE])
        if stage is QueueStage.OVER:
            return Lease(LeaseKind.OVER, stage=stage)
        if stage is QueueStage.SAVE or (stage is QueueStage.TRAIN and self._is_ahead(rank, bound)):
            return Lease(LeaseKind.LATER, stage=stage)
        found = self._next(stage, test_size, tests)
        if found.kind is not LeaseKind.LATER:
            self._rows[rank, [_KIND, _START, _SIZE]] = found.kind, found.start, found.size
            self._rows[rank, _VERSION] = self._head[_UPDATES]
        return found

    def trained(self, rank: int, loss: float, lr: float, staleness: int, applied: bool = True) -> Update:
        """This rank's piece is used; `applied` says whether that updated the parameters."""
        row, head = self._rows[rank], self._head
        size = int(row[_SIZE])
        head[_UPDATES] += applied
        head[_PIECES] += 1
        head[_SAMPLES] += size
        row[_STEPS] += 1
        row[_PROGRESS] += 1
        row[_DONE] += size
        row[_KIND] = LeaseKind.LATER
        update = Update(
            int(head[_PIECES]), int(head[_SAMPLES]), int(row[_START]), size, loss, lr, rank, staleness
        )
        self._log[head[_LOGGED] % _LOG] = update
        head[_LOGGED] += 1
        return update

    def flushed(self) -> None:
        """Gradients of earlier pieces updated the parameters."""
        self._head[_UPDATES] += 1

    def leave(self, rank: int) -> None:
        """This rank was told that the run is over."""
        self._rows[rank, _PRESENT] = 0

    def tested(self, rank: int, sums: EvaluationSums) -> None:
        """This rank's part of the test set is evaluated."""
        self._sums[rank] += sums
        self._rows[rank, _KIND] = LeaseKind.LATER

    @property
    def updates(self) -> int:
        """Updates of the parameters so far."""
        return int(self._head[_UPDATES])

    @property
    def is_full(self) -> bool:
        """Whether the log has no room for an update of each rank: wait until it is read."""
        return bool(self._head[_LOGGED] - self._head[_READ] >= _LOG - self.ranks)

    @property
    def has_work(self) -> bool:
        """Whether something can be leased, as far as can be seen without the lock."""
        head = self._head
        return bool(head[_RETURNED] or (head[_STAGE] == QueueStage.TRAIN and head[_TAKEN] < head[_UNTIL]))

    # ---- for the owner

    def begin(self, samples: int, steps: int) -> None:
        """Set where a run begins or resumes; staleness and the counts of each worker begin at zero."""
        self._head[[_STAGE, _TAKEN, _PIECES, _SAMPLES]] = QueueStage.SAVE, samples, steps, samples

    @property
    def stage(self) -> QueueStage:
        """What all workers are doing."""
        return QueueStage(self._head[_STAGE])

    @property
    def samples(self) -> int:
        """Training samples used so far."""
        return int(self._head[_SAMPLES])

    def train(self, until: int) -> None:
        """Lease out pieces of the order, up to the first one that ends at or after this position."""
        self._head[[_STAGE, _UNTIL]] = QueueStage.TRAIN, until

    def halt(self) -> None:
        """Lease out no more: the sync point is here."""
        self._head[_UNTIL] = min(self._head[_UNTIL], self._head[_TAKEN])

    def test(self) -> None:
        """Lease out the test set."""
        self._head[[_STAGE, _TESTED]] = QueueStage.TEST, 0
        self._sums[:] = 0.0

    def hold(self) -> None:
        """Lease out nothing, because a checkpoint is being saved."""
        self._head[_STAGE] = QueueStage.SAVE

    def end(self) -> None:
        """Tell all workers that the run is over."""
        self._head[_STAGE] = QueueStage.OVER

    def is_drained(self, tests: int) -> bool:
        """Whether everything that may be leased in this stage was leased, and is done."""
        stage, head = self.stage, self._head
        if head[_RETURNED] or (self._rows[:, _KIND] != LeaseKind.LATER).any():
            return False
        if stage is QueueStage.TRAIN:
            return bool(head[_TAKEN] >= head[_UNTIL])
        return stage is QueueStage.TEST and bool(head[_TESTED] >= tests)

    def put_back(self, rank: int, *, gone: bool = True) -> None:
        """Give this rank's lease to another: the rank is gone, or its gradient came too late."""
        row = self._rows[rank]
        if row[_KIND] != LeaseKind.LATER:
            self._returned[self._head[_RETURNED]] = row[[_KIND, _START, _SIZE]]
            self._head[_RETURNED] += 1
            row[_KIND] = LeaseKind.LATER
        if gone:
            row[_PRESENT] = 0
        else:
            row[_DROPPED] += 1

    def leased_at(self, version: int) -> int:
        """The number of pieces in work that were leased at this version of the parameters."""
        return int(((self._rows[:, _KIND] == LeaseKind.TRAIN) & (self._rows[:, _VERSION] == version)).sum())

    @property
    def present(self) -> int:
        """The number of ranks that work."""
        return int(self._rows[:, _PRESENT].sum())

    @property
    def sums(self) -> EvaluationSums:
        """Sums over the test set."""
        return EvaluationSums(*self._sums.sum(axis=0).tolist())

    def size_of(self, rank: int) -> int:
        """Samples of the piece that this rank works on."""
        return int(self._rows[rank, _SIZE])

    def shares(self) -> list[tuple[int, int, int]]:
        """For each rank: its samples, its updates, and its pieces that came too late."""
        return [(int(row[_DONE]), int(row[_STEPS]), int(row[_DROPPED])) for row in self._rows]

    def read(self) -> list[Update]:
        """The updates since the last call."""
        head, found = self._head, []
        while head[_READ] < head[_LOGGED]:
            step, samples, start, size, loss, lr, worker, staleness = self._log[head[_READ] % _LOG].tolist()
            counts = int(step), int(samples), int(start), int(size)
            found.append(Update(*counts, loss, lr, int(worker), int(staleness)))
            head[_READ] += 1
        return found

    def _next(self, stage: QueueStage, test_size: int, tests: int) -> Lease:
        head = self._head
        if head[_RETURNED]:
            head[_RETURNED] -= 1
            kind, start, size = self._returned[head[_RETURNED]].tolist()
            return Lease(LeaseKind(kind), start, size, stage)
        if stage is QueueStage.TRAIN and head[_TAKEN] < head[_UNTIL]:
            start = int(head[_TAKEN])
            head[_TAKEN] = self._order.piece(start, self._parts)
            return Lease(LeaseKind.TRAIN, start, int(head[_TAKEN]) - start, stage)
        if stage is QueueStage.TEST and head[_TESTED] < tests:
            start = int(head[_TESTED])
            head[_TESTED] = min(tests, start + test_size)
            return Lease(LeaseKind.TEST, start, int(head[_TESTED]) - start, stage)
        return Lease(LeaseKind.LATER, stage=stage)

    def _is_ahead(self, rank: int, bound: int | None) -> bool:
        return bound is not None and int(self._rows[rank, _PROGRESS]) - self._slowest() > bound

    def _slowest(self) -> int:
        """Steps of the slowest rank that works."""
        steps = self._rows[self._rows[:, _PRESENT] == 1, _PROGRESS]
        return int(steps.min()) if len(steps) else 0
