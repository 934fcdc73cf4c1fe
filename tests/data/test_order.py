"""Laws 1 to 3: the sequence of samples is a pure function of (seed, epoch, position)."""

from __future__ import annotations

from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from manyhands.data import order as order_
from manyhands.data.base import Request
from manyhands.data.order import BatchShare, Order, in_order, key, shuffle, split

sizes = st.integers(1, 400)
seeds = st.integers(0, 2**63 - 1)


def epoch_of(order: Order, epoch: int = 0) -> list[np.ndarray]:
    steps = -(-order.n // order.batch)
    return [request.samples for request in islice(order.batches(epoch * order.n), steps)]


@given(n=sizes, batch=sizes, workers=st.integers(1, 9), accumulate=st.integers(1, 5), seed=seeds)
def test_every_sample_exactly_once_an_epoch(
    n: int, batch: int, workers: int, accumulate: int, seed: int
) -> None:
    order = Order(n, batch, seed)
    seen = [
        sample
        for request in islice(order.batches(), -(-n // batch))
        for rank in range(workers)
        for part in BatchShare(rank, workers, accumulate).of(request)
        for sample in part.samples
    ]
    assert sorted(seen) == list(range(n))


@given(n=sizes, batch=sizes, workers=st.integers(1, 9), accumulate=st.integers(1, 5), seed=seeds)
def test_global_batches_do_not_depend_on_workers_or_accumulation(
    n: int, batch: int, workers: int, accumulate: int, seed: int
) -> None:
    order = Order(n, batch, seed)
    for request in islice(order.batches(), 5):
        parts = [BatchShare(rank, workers, accumulate).of(request) for rank in range(workers)]
        together = np.concatenate([part.samples for rank in parts for part in rank])
        assert np.array_equal(together, request.samples)
        assert {part.epoch for rank in parts for part in rank} == {request.epoch}


@given(n=sizes, batch=sizes, seed=seeds)
def test_the_ragged_end_is_a_batch_of_what_is_left(n: int, batch: int, seed: int) -> None:
    lengths = [len(samples) for samples in epoch_of(Order(n, batch, seed))]
    assert sum(lengths) == n
    assert set(lengths[:-1]) <= {batch}
    assert 1 <= lengths[-1] <= batch


@given(n=sizes, batch=sizes, seed=seeds)
def test_without_the_last_short_batch_all_are_full(n: int, batch: int, seed: int) -> None:
    """The others are those of the same seed with it; what is left out is left out of that epoch only."""
    batch = min(n, batch)
    order, whole = Order.of(n, batch, seed, drop_last=True), Order.of(n, batch, seed)
    assert order.n == n - n % batch
    full = epoch_of(order)
    assert [len(samples) for samples in full] == [batch] * (n // batch)
    assert all(np.array_equal(one, two) for one, two in zip(full, epoch_of(whole), strict=False))
    assert next(order.batches(order.n)).epoch == 1
    assert np.array_equal(order.samples(order.n, batch).samples, shuffle(n, seed, 1)[:batch])
    ends = [order.piece(seen, 2) for seen in range(order.n)] if batch > 1 else []
    assert all(end <= order.n for end in ends)


@given(n=sizes, batch=sizes, seed=seeds, epochs=st.integers(1, 3))
def test_resuming_anywhere_continues_the_same_sequence(n: int, batch: int, seed: int, epochs: int) -> None:
    order = Order(n, batch, seed)
    whole = list(islice(order.batches(), epochs * -(-n // batch)))
    seen = 0
    for number, request in enumerate(whole):
        again = next(order.batches(seen))
        assert again.epoch == request.epoch
        assert np.array_equal(again.samples, whole[number].samples)
        seen += len(request.samples)


def test_epochs_and_seeds_give_different_orders() -> None:
    first = shuffle(1000, 0, 0)
    assert not np.array_equal(first, shuffle(1000, 0, 1))
    assert not np.array_equal(first, shuffle(1000, 1, 0))
    assert np.array_equal(first, shuffle(1000, 0, 0))


def test_the_order_of_this_version_is_the_order_of_every_version() -> None:
    """A resumed run continues the sequence it began with, whatever was upgraded in between."""
    assert shuffle(10, 0, 0).tolist() == FIRST
    assert key(1, 2, 3) == KEY


FIRST = [7, 9, 1, 6, 0, 3, 5, 4, 2, 8]
KEY = 9812528628958509896


def test_the_shuffle_is_fair() -> None:
    """Each sample comes first about equally often: 2,000 orders of 10, five standard deviations."""
    firsts = np.bincount([shuffle(10, seed, 0)[0] for seed in range(2000)], minlength=10)
    assert np.all(np.abs(firsts - 200) < 5 * np.sqrt(2000 * 0.1 * 0.9))


@given(n=st.integers(0, 50), parts=st.integers(1, 60))
def test_split_is_even_to_within_one(n: int, parts: int) -> None:
    lengths = [len(part) for part in split(np.arange(n), parts)]
    assert len(lengths) == parts
    assert max(lengths) - min(lengths) <= 1
    assert sum(lengths) == n


@given(n=st.integers(0, 50), parts=st.integers(1, 60))
def test_sizes_are_those_of_the_parts(n: int, parts: int) -> None:
    assert order_.sizes(n, parts) == [len(part) for part in split(np.arange(n), parts)]


@given(n=st.integers(1, 50), replicas=st.integers(1, 4), micro_batches=st.integers(1, 6))
def test_stages_that_do_not_read_know_what_the_first_one_reads(
    n: int, replicas: int, micro_batches: int
) -> None:
    """Only by numbers: the sizes of the micro-batches, empty ones left out."""
    whole = Request(0, np.arange(n))
    for replica in range(replicas):
        share = order_.sizes(n, replicas)[replica]
        expected = [size for size in order_.sizes(share, micro_batches) if size]
        read = BatchShare(replica, replicas, micro_batches).of(whole)
        assert [len(part.samples) for part in read] == expected
        assert BatchShare(replica, replicas, micro_batches, reads=False).of(whole) == []


@given(n=sizes, batch=sizes)
def test_a_test_set_is_read_in_order(n: int, batch: int) -> None:
    assert np.concatenate([request.samples for request in in_order(n, batch)]).tolist() == list(range(n))
