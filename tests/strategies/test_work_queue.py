"""The work queue: every sample once per epoch, whichever worker leases, dies or comes late, in any order."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import MORE
from manyhands.data.order import Order, split
from manyhands.strategies.asynchronous import work_queue as module
from manyhands.strategies.asynchronous.work_queue import EvaluationSums, LeaseKind, QueueStage, WorkQueue


def queue(n: int, batch: int, ranks: int, parts: int | None = None) -> WorkQueue:
    memory = np.zeros(WorkQueue.size(ranks), dtype=np.uint8)
    made = WorkQueue(memory, ranks, Order(n, batch, seed=3), parts or ranks)
    for rank in range(ranks):
        made.enter(rank)
    made.begin(0, 0)
    return made


@given(n=st.integers(1, 60), batch=st.integers(1, 20), parts=st.integers(1, 7), start=st.integers(0, 200))
def test_pieces_are_the_parts_of_batches(n: int, batch: int, parts: int, start: int) -> None:
    """From any position on, they end where the parts of the batches do."""
    order = Order(n, min(batch, n), seed=0)
    seen = start
    ends = set()
    for first, request in zip(range(0, 10_000), order.batches((start // n) * n), strict=False):
        del first
        position = (start // n) * n if not ends else max(ends)
        for part in split(request.samples, parts):
            position += len(part)
            ends.add(position)
        if max(ends) > start + 3 * n:
            break
    while seen < start + 2 * n:
        end = order.piece(seen, parts)
        assert end == min(border for border in ends if border > seen)
        assert len(order.samples(seen, end - seen).samples) == end - seen
        seen = end


@settings(max_examples=40 * MORE, deadline=None)
@given(data=st.data())
def test_every_sample_is_used_once_per_epoch(data: st.DataObject) -> None:
    """Workers lease, finish, die, come too late and join in any order, over several sync points."""
    n, ranks = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    batch = data.draw(st.integers(1, n))
    work = queue(n, batch, ranks)
    epochs = 3
    used: Counter[tuple[int, int]] = Counter()
    until = data.draw(st.integers(1, epochs * n))
    work.train(until)
    leases: dict[int, tuple[int, int]] = {}
    alive = set(range(ranks))
    order = Order(n, batch, seed=3)
    for _ in range(20_000):
        if work.is_drained(0):
            if work.samples >= epochs * n:
                break
            until = data.draw(st.integers(work.samples + 1, epochs * n)) if until < epochs * n else epochs * n
            work.train(until)
        rank = data.draw(st.sampled_from(sorted(alive)))
        event = data.draw(st.sampled_from(["go", "go", "go", "late", "die"]))
        if rank not in leases:
            found = work.lease(rank, 1, 0)
            if found.kind is LeaseKind.TRAIN:
                leases[rank] = found.start, found.size
        elif event == "go":
            start, size = leases.pop(rank)
            update = work.trained(rank, 0.5, 0.1, 0)
            assert (update.start, update.size, update.worker) == (start, size, rank)
            request = order.samples(start, size)
            used.update((request.epoch, int(sample)) for sample in request.samples)
        elif event == "late":
            del leases[rank]
            work.put_back(rank, gone=False)
        elif len(alive) > 1:
            del leases[rank]
            work.put_back(rank)
            if data.draw(st.booleans()):
                work.enter(rank)  # a new one in its place
            else:
                alive.remove(rank)
        work.read()
    whole = {(epoch, sample) for epoch in range(epochs) for sample in range(n)}
    assert whole <= set(used)
    assert set(used.values()) == {1}
    assert work.samples == sum(used.values()) == sum(samples for samples, _, _ in work.shares())


def test_nothing_is_leased_beyond_a_sync_point_and_nothing_is_in_flight_when_it_is_drained() -> None:
    work = queue(20, 4, 2)
    work.train(5)
    leases = [work.lease(0, 1, 0), work.lease(1, 1, 0)]
    assert [(lease.start, lease.size) for lease in leases] == [(0, 2), (2, 2)]
    assert not work.is_drained(0)
    work.trained(1, 1.0, 0.1, 0)
    assert work.lease(1, 1, 0)[:3] == (LeaseKind.TRAIN, 4, 2)  # begins before the sync point, ends behind it
    work.trained(0, 1.0, 0.1, 1)
    assert work.lease(0, 1, 0).kind is LeaseKind.LATER
    assert not work.is_drained(0)
    work.trained(1, 1.0, 0.1, 0)
    assert work.is_drained(0)
    assert work.samples == 6


def test_a_halt_is_a_sync_point() -> None:
    work = queue(20, 4, 2)
    work.train(20)
    work.lease(0, 1, 0)
    work.halt()
    assert work.lease(1, 1, 0).kind is LeaseKind.LATER
    work.trained(0, 1.0, 0.1, 0)
    assert work.is_drained(0)


def test_a_bound_holds_back_the_worker_that_is_ahead() -> None:
    work = queue(40, 4, 2)
    work.train(40)
    assert work.lease(1, 1, 0, bound=1).kind is LeaseKind.TRAIN
    for _ in range(2):
        assert work.lease(0, 1, 0, bound=1).kind is LeaseKind.TRAIN
        work.trained(0, 1.0, 0.1, 0)
    assert work.lease(0, 1, 0, bound=1).kind is LeaseKind.LATER  # two steps ahead of worker 1
    work.trained(1, 1.0, 0.1, 0)
    assert work.lease(0, 1, 0, bound=1).kind is LeaseKind.TRAIN
    work.put_back(1)  # a worker that is gone holds back no other
    work.trained(0, 1.0, 0.1, 0)
    assert work.lease(0, 1, 0, bound=0).kind is LeaseKind.TRAIN


def test_a_worker_that_joins_is_no_step_behind() -> None:
    work = queue(400, 4, 3)
    work.train(400)
    work.put_back(2)
    for _ in range(7):
        for rank in (0, 1):
            work.lease(rank, 1, 0, bound=0)
            work.trained(rank, 1.0, 0.1, 0)
    work.enter(2)
    assert work.lease(0, 1, 0, bound=0).kind is LeaseKind.TRAIN


def test_the_test_set_is_handed_out_and_summed() -> None:
    work = queue(4, 4, 2)
    work.test()
    assert work.stage is QueueStage.TEST
    first, second = work.lease(0, 6, 10), work.lease(1, 6, 10)
    assert (first[:3], second[:3]) == ((LeaseKind.TEST, 0, 6), (LeaseKind.TEST, 6, 4))
    work.tested(0, EvaluationSums(3.0, 1.5, 6.0))
    work.put_back(1)  # its part is evaluated again
    assert not work.is_drained(10)
    assert work.lease(0, 6, 10)[:3] == (LeaseKind.TEST, 6, 4)
    work.tested(0, EvaluationSums(2.0, 0.25, 4.0))
    assert work.is_drained(10)
    assert work.sums == (5.0, 1.75, 10.0)
    work.test()
    assert work.sums == (0.0, 0.0, 0.0)  # nothing of the test before


def test_the_log_keeps_the_order_and_says_when_it_is_full() -> None:
    work = queue(1_000_000, 2, 2)
    work.train(1_000_000)
    count = 0
    while not work.is_full:
        work.lease(count % 2, 1, 0)
        work.trained(count % 2, float(count), 0.1, count)
        count += 1
    assert count == 4094
    assert [update.loss for update in work.read()] == [float(number) for number in range(count)]
    assert not work.is_full
    assert work.read() == []


def test_two_views_of_one_memory_are_one_ledger() -> None:
    memory = np.zeros(WorkQueue.size(2), dtype=np.uint8)
    one, other = (WorkQueue(memory, 2, Order(8, 4, 0), 2) for _ in range(2))
    one.enter(0)
    one.begin(0, 0)
    one.train(8)
    other.enter(1)
    assert other.lease(1, 1, 0).start == 0
    assert one.lease(0, 1, 0).start == 2
    assert one.present == other.present == 2


@pytest.mark.parametrize("kind", [QueueStage.SAVE, QueueStage.OVER])
def test_stages_without_work(kind: QueueStage) -> None:
    work = queue(8, 4, 1)
    work.train(8)
    if kind is QueueStage.SAVE:
        work.hold()
        assert work.lease(0, 1, 0)[0::3] == (LeaseKind.LATER, QueueStage.SAVE)
    else:
        work.end()
        assert work.lease(0, 1, 0).kind is LeaseKind.OVER


class KilledError(BaseException):
    """The end of a process between two lines."""


def killed(line: int, action: Callable[[], object]) -> bool:
    """Whether an action was still running at its n-th line in the queue's code; it stops there then."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            count += 1
            if count == line:
                raise KilledError
        return trace

    sys.settrace(trace)
    try:
        action()
    except KilledError:
        return True
    finally:
        sys.settrace(None)
    return False


def numbers(work: WorkQueue) -> list[Any]:
    """All that counts."""
    head = work._head[: module._WRITER].tolist()
    return [head, work._rows.tolist(), work._sums.tolist(), work._returned[: head[-1]].tolist()]


@pytest.mark.parametrize("action", ["lease", "lease what was put back", "trained", "test", "tested", "enter"])
def test_what_a_killed_worker_had_begun_is_undone(action: str) -> None:
    """It was once left half done, in one of a hundred kills: a piece was never used, the run never ended."""
    actions: dict[str, Callable[[WorkQueue], object]] = {
        "lease": lambda work: work.lease(1, 1, 4),
        "lease what was put back": lambda work: work.lease(1, 1, 4),
        "trained": lambda work: work.trained(1, 0.5, 0.1, 0),
        "test": lambda work: work.lease(1, 1, 4),
        "tested": lambda work: work.tested(1, EvaluationSums(3.0, 4.0, 1.0)),
        "enter": lambda work: work.enter(1),
    }

    def act(work: WorkQueue) -> None:
        with work.changing(1):
            actions[action](work)

    def prepared() -> WorkQueue:
        work = queue(8, 4, 3)
        work.train(8) if "test" not in action else work.test()
        if action in ("trained", "tested", "enter"):
            work.lease(1, 1, 4)
        if action == "lease what was put back":
            work.lease(2, 1, 4)
            work.put_back(2)
        return work

    line, work, before = 1, prepared(), numbers(prepared())
    while killed(line, partial(act, work)):
        with work.changing(0):  # the next worker
            assert numbers(work) == before, line
        line, work = line + 1, prepared()
    assert line > 8
    assert numbers(work) != before


def test_a_replacement_returns_the_lease_of_the_worker_before_it() -> None:
    """Rank 0 may be busy for so long that it never sees the loss: one step, and a successor has joined."""
    work = queue(8, 4, 2)
    work.train(8)
    lost = work.lease(1, 1, 0)
    work.enter(1)
    assert work.present == 2
    assert work.lease(0, 1, 0) == lost
