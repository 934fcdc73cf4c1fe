"""The conformance suite of transports: subclass it and implement `run_group`.

What a rank does is a module-level function, so that it can be sent to a process.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.core.errors import DeadlineError, PeerLostError
from manyhands.testing.rank_functions import (
    awaits,
    broadcasts_named_tensors,
    dies_with_lock,
    receives_from_any,
    receives_nothing,
    sends_around_ring,
    splits,
    takes_turns,
)
from manyhands.transports.base import Transport

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 0, 4))
# Bytes around the limits at which a transport may divide a tensor into pieces, and some megabytes.
LENGTHS = (4, 4096, 2**16 - 4, 2**16, 2**16 + 4, 2**20 - 4, 2**20, 2**20 + 4, 5 * 2**20 + 12)

Rank = Callable[[Transport], Any]


class TransportSuite:
    """Contract tests of a transport. `run_group` runs a function at every rank."""

    sizes: tuple[int, ...] = (1, 2, 3)
    dies: Callable[[], Any] | None = partial(os._exit, 3)  # how a rank dies while others wait for it
    short = 0.5  # seconds: the timeout in tests of timeouts; connecting must not take longer
    late = r"waited 0\.\d s in {operation} \d+ for worker {last}"
    lost = r"worker {last} is gone \(noticed in {operation} \d+\)"

    def run_group(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        """Run a function at every rank of a group with this timeout, and return the results by rank."""
        raise NotImplementedError

    def each(self, function: Rank) -> None:
        """Run a check that returns None, at all sizes."""
        for size in self.sizes:
            assert self.run_group(size, function) == [None] * size

    def test_ranks_are_numbered(self) -> None:
        """Each rank knows its number, the size, and that it shares memory with itself."""
        for size in self.sizes:
            assert self.run_group(size, who) == [(rank, size, True) for rank in range(size)]

    def test_all_reduce_sums_in_place(self) -> None:
        """Any dtype and shape, empty ones included."""
        self.each(sums)

    def test_all_reduce_takes_any_layout(self) -> None:
        """Transposed, strided, a parameter. Memory beside the tensor does not change."""
        self.each(layouts)

    def test_all_reduce_has_the_same_bits_everywhere_and_always(self) -> None:
        """At every rank and in every repetition, for lengths around every limit."""
        for size in self.sizes:
            digests = self.run_group(size, bits)
            assert all(first == second for first, second in digests)
            assert len({first for first, _ in digests}) == 1

    def test_broadcast_gives_the_roots_tensor(self) -> None:
        """From every root; any dtype, shape, layout and length."""
        self.each(broadcasts)

    def test_named_tensors_are_broadcast_from_rank_0(self) -> None:
        """As when a run is resumed from a checkpoint that only rank 0 has read."""
        self.each(broadcasts_named_tensors)

    def test_all_gather_takes_uneven_shapes(self) -> None:
        """By rank, each in its own shape, none sharing memory with the input."""
        self.each(gathers)

    def test_messages_arrive_in_order(self) -> None:
        """Around a ring, several in flight before the first is received."""
        self.each(sends_around_ring)

    def test_messages_of_any_size_in_both_directions(self) -> None:
        """Empty, small and large, of any dtype and layout."""
        self.each(messages)

    def test_barrier_waits_for_all(self) -> None:
        """No rank leaves before the last has come."""
        for size in self.sizes:
            times = self.run_group(size, barrier_times)
            for passages in zip(*times, strict=True):
                assert max(came for came, _ in passages) <= min(left for _, left in passages)

    @pytest.mark.parametrize("operation", ["barrier", "all_reduce", "recv"])
    def test_a_wait_ends_at_its_timeout(self, operation: str) -> None:
        """The error says how long the rank waited, in which operation, and for which worker."""
        size = max(self.sizes)
        if size == 1:
            pytest.skip("a rank alone never waits")
        errors = self.run_group(
            size, partial(waits_in_vain, operation=operation, away=2 * self.short), self.short
        )[:-1]
        # A slower rank may notice first that another has given up.
        waited = [text for text in errors if not re.fullmatch(r".* is gone \(noticed in .*\)", text)]
        expected = self.late.format(operation=operation, last=size - 1)
        assert waited, errors
        assert all(re.fullmatch(expected, text) for text in waited), errors

    @pytest.mark.parametrize("operation", ["barrier", "all_reduce", "recv"])
    def test_a_dead_peer_ends_a_wait(self, operation: str) -> None:
        """A rank dies: the others do not wait for their timeout."""
        size = max(self.sizes)
        if size == 1 or self.dies is None:
            pytest.skip("a rank alone has no peers" if size == 1 else "the launcher ends all ranks")
        since = time.monotonic()
        errors = self.run_group(size, partial(loses_a_peer, operation=operation, dies=self.dies))
        assert time.monotonic() - since < 10
        expected = self.lost.format(operation=operation, last=size - 1)
        assert all(re.fullmatch(expected, text) for text in errors[:-1]), errors

    def test_shared_memory_is_zeroed_and_the_same(self) -> None:
        """At every peer on the host, and each name has its own."""
        self.each(shares)

    def test_add_shared_sums(self) -> None:
        """One part, two, or more."""
        self.each(adds)

    def test_a_lock_has_one_holder(self) -> None:
        """Among peers that share memory: no increment of a shared counter is lost."""
        self.each(takes_turns)

    def test_a_dead_holder_releases_its_lock(self) -> None:
        """Without any help of others."""
        size = max(self.sizes)
        if size == 1 or self.dies is None:
            pytest.skip("a rank alone has no peers" if size == 1 else "the launcher ends all ranks")
        results = self.run_group(size, partial(dies_with_lock, dies=self.dies))
        assert results[:-1] == ["locked"] * (size - 1)

    def test_wait_for_returns_when_memory_changes(self) -> None:
        """Memory that a peer writes, or a condition of its own. It returns False after its timeout."""
        self.each(awaits)

    def test_recv_any_takes_every_message(self) -> None:
        """All messages arrive, those of one rank in order, also with `recv` in between."""
        self.each(receives_from_any)

    def test_recv_any_ends_at_its_timeout(self) -> None:
        """The timeout passes, or all others have given up."""
        size = max(self.sizes)
        if size == 1:
            pytest.skip("a rank alone never waits")
        errors = self.run_group(size, receives_nothing, self.short)
        expected = r"waited 0\.\d s in recv_any \d+ for .*|.* gone \(noticed in recv_any \d+\)"
        assert all(re.fullmatch(expected, text) for text in errors), errors
        assert any(text.startswith("waited") for text in errors), errors

    def test_split_makes_independent_groups(self) -> None:
        """Each group has its own ranks, sums, broadcasts and messages."""
        self.each(splits)

    def test_on_host_and_across_span_the_group(self) -> None:
        """Summing over one and then the other sums over all."""
        self.each(spans)

    def test_closing_twice(self) -> None:
        """Closing again does nothing."""
        self.each(closes)


def who(transport: Transport) -> tuple[int, int, bool]:
    """Rank, size, and whether the rank is its own peer."""
    return transport.rank, transport.size, transport.rank in transport.peers_on_host


def sums(transport: Transport) -> None:
    """Sum small integers, which every dtype can represent."""
    total = sum(range(1, transport.size + 1))
    for dtype in DTYPES:
        for shape in SHAPES:
            tensor = torch.full(shape, transport.rank + 1, dtype=dtype)
            expected = torch.full(shape, total, dtype=dtype)
            assert transport.all_reduce(tensor) is tensor, (dtype, shape)
            assert torch.equal(tensor, expected), (dtype, shape, tensor)


def layouts(transport: Transport) -> None:
    """A column of a matrix, a transposed one, a parameter."""
    total = float(sum(range(1, transport.size + 1)))
    matrix = torch.zeros(5, 4)
    matrix[:, 1] = transport.rank + 1
    transport.all_reduce(matrix[:, 1])
    assert torch.equal(matrix.sum(0), torch.tensor([0.0, 5 * total, 0.0, 0.0]))
    turned = torch.full((300, 200), transport.rank + 1.0).t()
    transport.all_reduce(turned)
    assert bool((turned == total).all())
    weight = nn.Parameter(torch.full((3,), transport.rank + 1.0))
    transport.all_reduce(weight)
    assert weight.tolist() == [total] * 3


def bits(transport: Transport) -> tuple[str, str]:
    """Digests of two identical series of sums of random numbers."""

    def once() -> str:
        digest = hashlib.sha256()
        for nbytes in LENGTHS:
            parts = [_random(nbytes, rank) for rank in range(transport.size)]
            tensor = transport.all_reduce(parts[transport.rank].clone())
            assert torch.allclose(tensor, torch.stack(parts).sum(0), atol=1e-5), nbytes
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    return once(), once()


def broadcasts(transport: Transport) -> None:
    """Broadcast from each root."""
    for root in range(transport.size):
        for dtype in DTYPES:
            for shape in SHAPES:
                tensor = torch.full(shape, 3 if transport.rank == root else 0, dtype=dtype)
                assert transport.broadcast(tensor, root) is tensor
                assert torch.equal(tensor, torch.full(shape, 3, dtype=dtype)), (root, dtype, shape)
        for nbytes in LENGTHS:
            tensor = _random(nbytes, transport.rank)
            transport.broadcast(tensor, root)
            assert torch.equal(tensor, _random(nbytes, root)), (root, nbytes)
        turned = torch.full((3, 2), float(transport.rank)).t()
        transport.broadcast(turned, root)
        assert bool((turned == root).all())


def gathers(transport: Transport) -> None:
    """Shapes by rank: of different length, number of dimensions and size."""
    for dtype in DTYPES:
        mine = torch.full((transport.rank,), transport.rank, dtype=dtype)
        parts = transport.all_gather(mine)
        mine.fill_(0)
        for rank, part in enumerate(parts):
            assert torch.equal(part, torch.full((rank,), rank, dtype=dtype)), (rank, part)
    for rank, part in enumerate(transport.all_gather(torch.ones((2,) * transport.rank))):
        assert torch.equal(part, torch.ones((2,) * rank))
    for rank, part in enumerate(transport.all_gather(_random(700_000 * transport.rank, transport.rank))):
        assert torch.equal(part, _random(700_000 * rank, rank))
    turned = torch.arange(6).view(2, 3).t()
    assert all(torch.equal(part, turned) for part in transport.all_gather(turned))


def messages(transport: Transport) -> None:
    """From the first rank to the last and back again."""
    first, last = 0, transport.size - 1
    if transport.rank not in (first, last) or first == last:
        return
    peer = last if transport.rank == first else first

    def transfer(tensor: Tensor) -> None:
        received = torch.zeros_like(tensor)
        for sender in (first, last):
            if transport.rank == sender:
                transport.send(tensor, peer)
            else:
                assert transport.recv(received, peer) is received
        assert torch.equal(received, tensor)

    for dtype in DTYPES:
        for shape in SHAPES:
            transfer(torch.full(shape, 3, dtype=dtype))
    for nbytes in LENGTHS:
        transfer(_random(nbytes, 7))
    transfer(torch.arange(6.0).view(2, 3).t())


def barrier_times(transport: Transport) -> list[tuple[float, float]]:
    """When this rank came to each barrier and when it left; each time another rank is the last."""
    times = []
    for late in range(transport.size):
        if transport.rank == late:
            time.sleep(0.05)
        came = time.monotonic()
        transport.barrier()
        times.append((came, time.monotonic()))
    return times


def waits_in_vain(transport: Transport, operation: str, away: float) -> str:
    """The last rank stays away until all others have given up."""
    transport.barrier()
    if transport.rank == transport.size - 1:
        time.sleep(away)
        return ""
    with pytest.raises((DeadlineError, PeerLostError)) as caught:
        _do(transport, operation)
    return str(caught.value)


def loses_a_peer(transport: Transport, operation: str, dies: Callable[[], Any]) -> str:
    """The last rank dies while the others wait for it."""
    transport.barrier()
    if transport.rank == transport.size - 1:
        time.sleep(0.1)
        dies()
        return ""
    with pytest.raises(PeerLostError) as caught:
        _do(transport, operation)
    return str(caught.value)


def shares(transport: Transport) -> None:
    """Each peer writes its own byte and reads those of all others."""
    first, second = transport.share("one", 100_000), transport.share("two/2", 3 * 4096)
    host = transport.on_host
    for memory, factor in ((first, 1), (second, 2)):
        assert memory.dtype == torch.uint8
        assert not memory.any()
        host.barrier()
        memory[host.rank] = factor * (host.rank + 1)
        host.barrier()
        assert memory[: host.size].tolist() == [factor * (rank + 1) for rank in range(host.size)]
        host.barrier()
    assert len(first) == 100_000
    assert transport.share("nothing", 0).numel() == 0


def adds(transport: Transport) -> None:
    """Parts that lie in shared memory."""
    memory = transport.share("parts", 4 * 8 * 4).view(torch.float32).view(4, 8)
    for number, part in enumerate(memory):
        part.fill_(number + 1)
    transport.barrier()
    for count in range(1, 5):
        out = torch.empty(8)
        assert transport.add_shared(list(memory[:count]), out) is out
        assert out.tolist() == [float(sum(range(1, count + 1)))] * 8


def spans(transport: Transport) -> None:
    """The sum at once and in two steps."""
    whole, by_parts = (torch.full((5,), 2.0**transport.rank) for _ in range(2))
    transport.all_reduce(whole)
    transport.across.all_reduce(transport.on_host.all_reduce(by_parts))
    assert torch.equal(whole, by_parts)
    assert transport.on_host.size * transport.across.size == transport.size
    assert len(transport.peers_on_host) == transport.on_host.size


def closes(transport: Transport) -> None:
    """Close twice, when all ranks are done."""
    transport.barrier()
    transport.close()
    transport.close()


def _do(transport: Transport, operation: str) -> None:
    if operation == "barrier":
        transport.barrier()
    elif operation == "all_reduce":
        transport.all_reduce(torch.ones(3))
    else:
        transport.recv(torch.ones(3), transport.size - 1)


def _random(nbytes: int, seed: int) -> Tensor:
    return torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(seed))
