"""Functions that ranks run to test locks, waits, messages from any rank, groups and broadcasts."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch

from manyhands.core.errors import DeadlineError, PeerLostError
from manyhands.transports.base import LOCKS, Awaited, Transport
from manyhands.transports.broadcast import PIECE, broadcast_tensors

TURNS = 200
LONG = 20.0  # seconds: a wait that takes this long is a failure


def takes_turns(transport: Transport) -> None:
    """Increment one counter per lock: read, then write."""
    counters = transport.share("counters", 8 * LOCKS).view(torch.int64).numpy()
    transport.barrier()
    for _ in range(TURNS):
        for number in range(LOCKS):
            with transport.lock(number):
                before = int(counters[number])
                time.sleep(0)  # a moment in which another rank could write
                counters[number] = before + 1
    transport.barrier()
    assert counters.tolist() == [TURNS * transport.on_host.size] * LOCKS


def dies_with_lock(transport: Transport, dies: Callable[[], Any]) -> str:
    """The last rank dies while it holds a lock that the others wait for."""
    last = transport.size - 1
    if transport.rank == last:
        with transport.lock(1):
            for other in range(last):
                transport.send(torch.ones(1), other)
            time.sleep(0.2)  # until the others wait, and the messages have left
            dies()
        return ""
    transport.recv(torch.zeros(1), last)
    with transport.lock(1):
        return "locked"


def awaits(transport: Transport) -> None:
    """The first rank of each host changes memory that the others wait for. They notice it at once."""
    host, changed = transport.on_host, transport.share("changed", 64)
    for number, what in enumerate(get_args(Awaited)):
        transport.barrier()
        since = time.monotonic()
        if host.rank == 0:
            time.sleep(0.02)
            changed[number] = 1
            transport.notify()
        assert transport.wait_for(partial(bool, changed[number]), LONG, what)
        assert time.monotonic() - since < LONG / 2
        since = time.monotonic()
        assert not transport.wait_for(lambda: False, 0.01, what)
        assert time.monotonic() - since >= 0.01
    assert transport.wait_for(lambda: time.monotonic() - since > 0.03, 0.06)


def receives_from_any(transport: Transport) -> None:
    """Rank 0 receives short and long messages from all other ranks, and answers each."""
    by_message = transport.messages
    assert (by_message.rank, by_message.size) == (transport.rank, transport.size)
    short, long = torch.zeros(2, dtype=torch.int64), torch.zeros(70_000)
    if transport.rank:
        for number in range(6):
            by_message.send(torch.tensor([transport.rank, number]), 0)
            if number % 2:
                by_message.send(torch.full((70_000,), transport.rank * 10.0 + number), 0)
                assert by_message.recv(short, 0).tolist() == [number, transport.rank]
        return
    received: dict[int, list[int]] = {rank: [] for rank in range(1, transport.size)}
    for _ in range(6 * (transport.size - 1)):
        source = by_message.recv_any(short)
        rank, number = short.tolist()
        assert rank == source
        received[rank].append(number)
        if number % 2:
            by_message.recv(long, rank)
            assert bool((long == rank * 10.0 + number).all())
            by_message.send(torch.tensor([number, rank]), rank)
    assert all(numbers == list(range(6)) for numbers in received.values())


def receives_nothing(transport: Transport) -> str:
    """All ranks wait for a message, and none sends one."""
    transport.barrier()
    with pytest.raises((DeadlineError, PeerLostError)) as caught:
        transport.messages.recv_any(torch.zeros(3))
    return str(caught.value)


def splits(transport: Transport) -> None:
    """Split into even and odd ranks, twice. The whole group still works afterwards."""
    size, rank = transport.size, transport.rank
    groups = [tuple(range(first, size, 2)) for first in range(min(2, size))]
    mine = groups[rank % 2]
    for _ in range(2):
        part = transport.messages.split(groups)
        assert (part.rank, part.size) == (mine.index(rank), len(mine))
        summed = part.all_reduce(torch.full((70_000,), float(rank)))
        assert bool((summed == sum(mine)).all())
        assert part.broadcast(torch.tensor([rank]), part.size - 1).tolist() == [mine[-1]]
        if part.size > 1 and part.rank < 2:
            if part.rank == 0:
                part.send(torch.tensor([rank]), 1)
            else:
                assert part.recv(torch.zeros(1, dtype=torch.int64), 0).tolist() == [mine[0]]
    assert transport.messages.all_reduce(torch.tensor([1.0])).item() == size


def broadcasts_named_tensors(transport: Transport) -> None:
    """Rank 0's tensors by name, of any dtype and shape, and larger than one piece."""
    made = {
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.zeros(0, 3),
        "turned": torch.arange(6).view(2, 3).t(),
        "half": torch.arange(7).bfloat16(),
        "large": torch.arange(2 * PIECE // 4 + 3, dtype=torch.int32),
        "flags": torch.tensor([True, False, True]),
    }
    found, text = broadcast_tensors(transport, made if transport.rank == 0 else None, "any text: \u00fc")
    assert text == "any text: \u00fc"
    assert found.keys() == made.keys()
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def sends_around_ring(transport: Transport) -> None:
    """Each rank sends three messages to the next rank, then receives three from the previous one."""
    if transport.size == 1:
        return
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    for turn in range(5):
        for number in range(3):
            message = torch.tensor([transport.rank, turn, number])
            transport.send(message, after)
            message.fill_(-1)  # after a send, the sender may change its tensor
        for number in range(3):
            received = transport.recv(torch.zeros(3, dtype=torch.int64), before)
            assert received.tolist() == [before, turn, number]
