"""What ranks do to show locks, waits in shared memory, messages from anybody and groups of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch

from manyhands.core.errors import DeadlineError, PeerLostError
from manyhands.transports.base import EXCLUSIVE, Awaited, Transport
from manyhands.transports.broadcast import PIECE, broadcast_tensors

TURNS = 200
LONG = 20.0  # seconds: nobody waits for that long, or it shows


def takes_turns(transport: Transport) -> None:
    """Read, and write one more, a counter for each lock."""
    counters = transport.share("counters", 8 * EXCLUSIVE).view(torch.int64).numpy()
    transport.barrier()
    for _ in range(TURNS):
        for number in range(EXCLUSIVE):
            with transport.exclusive(number):
                before = int(counters[number])
                time.sleep(0)  # a moment in which others would write
                counters[number] = before + 1
    transport.barrier()
    assert counters.tolist() == [TURNS * transport.on_host.size] * EXCLUSIVE


def dies_inside(transport: Transport, dies: Callable[[], Any]) -> str:
    """The last rank ends where only one may be at a time; the others come there when it is inside."""
    last = transport.size - 1
    if transport.rank == last:
        with transport.exclusive(1):
            for other in range(last):
                transport.send(torch.ones(1), other)
            time.sleep(0.2)  # others come, and a message is on its way
            dies()
        return ""
    transport.recv(torch.zeros(1), last)
    with transport.exclusive(1):
        return "in"


def awaits(transport: Transport) -> None:
    """The first of each host changes something that the others wait for; they see it at once."""
    host, changed = transport.on_host, transport.share("changed", 64)
    for number, what in enumerate(get_args(Awaited)):
        transport.barrier()
        since = time.monotonic()
        if host.rank == 0:
            time.sleep(0.02)
            changed[number] = 1
            transport.ring()
        assert transport.until(partial(bool, changed[number]), LONG, what)
        assert time.monotonic() - since < LONG / 2
        since = time.monotonic()
        assert not transport.until(lambda: False, 0.01, what)
        assert time.monotonic() - since >= 0.01
    assert transport.until(lambda: time.monotonic() - since > 0.03, 0.06)


def listens(transport: Transport) -> None:
    """The first rank hears all others, who say a word and then a longer one; and answers each."""
    by_message = transport.messages
    assert (by_message.rank, by_message.size) == (transport.rank, transport.size)
    words, long = torch.zeros(2, dtype=torch.int64), torch.zeros(70_000)
    if transport.rank:
        for number in range(6):
            by_message.send(torch.tensor([transport.rank, number]), 0)
            if number % 2:
                by_message.send(torch.full((70_000,), transport.rank * 10.0 + number), 0)
                assert by_message.recv(words, 0).tolist() == [number, transport.rank]
        return
    heard: dict[int, list[int]] = {rank: [] for rank in range(1, transport.size)}
    for _ in range(6 * (transport.size - 1)):
        source = by_message.recv_any(words)
        rank, number = words.tolist()
        assert rank == source
        heard[rank].append(number)
        if number % 2:
            by_message.recv(long, rank)
            assert bool((long == rank * 10.0 + number).all())
            by_message.send(torch.tensor([number, rank]), rank)
    assert all(numbers == list(range(6)) for numbers in heard.values())


def listens_in_vain(transport: Transport) -> str:
    """Everybody listens, nobody speaks."""
    transport.barrier()
    with pytest.raises((DeadlineError, PeerLostError)) as caught:
        transport.messages.recv_any(torch.zeros(3))
    return str(caught.value)


def divides(transport: Transport) -> None:
    """Those of even and of odd rank, and again; then the gang is as it was."""
    size, rank = transport.size, transport.rank
    groups = [tuple(range(first, size, 2)) for first in range(min(2, size))]
    mine = groups[rank % 2]
    for _ in range(2):
        part = transport.messages.parts(groups)
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


def hands_around(transport: Transport) -> None:
    """Rank 0's tensors by name, of any type and shape, and of more bytes than travel at once."""
    made = {
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.zeros(0, 3),
        "turned": torch.arange(6).view(2, 3).t(),
        "half": torch.arange(7).bfloat16(),
        "large": torch.arange(2 * PIECE // 4 + 3, dtype=torch.int32),
        "flags": torch.tensor([True, False, True]),
    }
    found, words = broadcast_tensors(transport, made if transport.rank == 0 else None, "so be it: \u00fc")
    assert words == "so be it: \u00fc"
    assert found.keys() == made.keys()
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def ring(transport: Transport) -> None:
    """Three messages each to the next rank, then three from the one before."""
    if transport.size == 1:
        return
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    for turn in range(5):
        for number in range(3):
            message = torch.tensor([transport.rank, turn, number])
            transport.send(message, after)
            message.fill_(-1)  # a message that was sent is the sender's again
        for number in range(3):
            received = transport.recv(torch.zeros(3, dtype=torch.int64), before)
            assert received.tolist() == [before, turn, number]
