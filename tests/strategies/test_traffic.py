"""Bytes are counted in one unit: a strategy exchanges the same, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.data.base import Batch
from manyhands.engine.timing.clock import Clock
from manyhands.engine.timing.traffic import CountingTransport
from manyhands.recipes.members import constant
from manyhands.strategies.asynchronous.parameter_store import ParameterStore
from manyhands.strategies.asynchronous.server_channel import ServerReply, ServerRequest, Verb, server_channel
from manyhands.strategies.base import Compute, SynchronousSetup
from manyhands.strategies.data_parallel.allreduce import allreduce
from manyhands.strategies.pipeline.stage_link import LinkSize, LinkSpec, open_links
from manyhands.transports import tensor_bytes
from manyhands.transports.base import CPU, Transport
from manyhands.transports.shm.transport import ShmTransport
from manyhands.transports.solo import SoloTransport
from manyhands.transports.threads import ThreadGroup
from manyhands.transports.torch_ import TorchTransport
from transports.groups import processes


def moved(counting: CountingTransport) -> int:
    return sum(entry.bytes for entry in counting.traffic.values())


# ---- sums


def trains(transport: Transport) -> list[int]:
    """Bytes of each of three steps; slices of the model are uneven."""
    counting, rank, size = CountingTransport(transport), transport.rank, transport.size
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 17), nn.BatchNorm1d(17), nn.Linear(17, 5))
    recipe = constant(lr=0.1, momentum=0.9)
    compute = Compute(nn.functional.cross_entropy)
    worker = allreduce(SynchronousSetup(model=model, recipe=recipe, compute=compute, transport=counting))
    found = []
    for _ in range(3):
        before = moved(counting)
        batch = Batch(torch.randn(2 + rank % 2, 33), torch.zeros(2 + rank % 2, dtype=torch.int64))
        worker.step([batch], sum(2 + each % 2 for each in range(size)), 0.1)
        found.append(moved(counting) - before)
    return found


def in_threads(hosts: str) -> list[Any]:
    return ThreadGroup(len(hosts), 20, hosts).run(trains)


WAYS: dict[str, Callable[[int], list[Any]]] = {
    "threads that share memory": lambda size: in_threads("a" * size),
    "threads that send messages": lambda size: in_threads("abcd"[:size]),
    "shm": lambda size: processes(partial(ShmTransport, timeout=20.0), ["here"] * size, trains),
    "torch": lambda size: processes(partial(TorchTransport, timeout=20.0), ["here"] * size, trains),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_sum_of_gradients_counts_the_same_on_every_transport(way: str, size: int) -> None:
    """At each rank the parameters once, whatever its slice, and the step header: by hand for this model."""
    lengths = (33 * 17, 17, 17, 17, 17 * 5, 5)
    rows = sum(-(-length // 16) * 16 for length in lengths)  # each begins on a cache line
    header = (
        7 + len(lengths) + 2 * 17
    )  # loss, votes, weight, which gradients there are, the norm's statistics
    assert WAYS[way](size) == [[4 * (rows + header)] * 3] * size


def test_a_rank_alone_exchanges_nothing() -> None:
    counting = CountingTransport(SoloTransport())
    counting.all_reduce(torch.zeros(10))
    assert (counting.traffic["all_reduce"].calls, moved(counting)) == (1, 0)


# ---- what is sent


def sends(transport: Transport) -> tuple[int, int]:
    """Payload, and bytes of what announces it."""
    counting = CountingTransport(transport)
    [link] = open_links(counting, [LinkSpec(0, 1, "activation", LinkSize(2, 4000))], CPU)
    assert link is not None
    for size in (1000, 10, 500):
        if transport.rank == 0:
            link.put(torch.zeros(size))
        else:
            assert link.take().shape == (size,)
            link.release()
    headers = sum(counting.traffic[name].calls for name in ("send", "recv") if name in counting.traffic) // 2
    return moved(counting), headers * tensor_bytes.HEADER * 8


def test_an_activation_counts_at_both_ends_in_memory_and_as_a_message() -> None:
    for hosts, announced in (("aa", 0), ("ab", 3)):
        for nbytes, headers in ThreadGroup(2, 20, hosts).run(sends):
            assert headers == announced * 512
            assert nbytes - headers == 4 * 1510


MESSAGE = 16 * 8  # bytes of a request or a reply


def serves(transport: Transport) -> int:
    """A worker pushes its gradient and pulls parameters, twice."""
    counting = CountingTransport(transport)
    store = ParameterStore(nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10)), 1)
    channel = server_channel(counting, store, 1, False)
    asking = ServerRequest(Verb.TRAINED, pushed=True, pull=True)
    before, into = moved(counting), torch.zeros(store.size)
    for _ in range(2):
        if transport.rank:
            reply = channel.ask(0, asking)
            channel.pull(0, into, reply)
        else:
            heard = None
            while heard is None:
                heard = channel.listen(1.0)
            channel.answer(heard[0], ServerReply(pull=True))
    return moved(counting) - before


def test_a_push_and_a_pull_count_at_both_ends_in_memory_and_as_messages() -> None:
    parameters, buffers, tensors = 112 + 3 * 16, 10 + 10 + 1, 4
    payload = 4 * (parameters + tensors + buffers) + 4 * (parameters + buffers)
    for hosts, messages in (("aa", 0), ("ab", 2 * MESSAGE)):
        assert ThreadGroup(2, 20, hosts).run(serves) == [2 * (payload + messages)] * 2


# ---- what is counted of a run


def test_what_is_exchanged_beside_training_is_no_part_of_it() -> None:
    def work(transport: Transport) -> dict[str, int]:
        clock = Clock()
        counting = CountingTransport(transport, clock)
        counting.broadcast(torch.zeros(1000))  # while everything is built
        counting.begin()
        counting.all_reduce(torch.zeros(10))
        for phase in ("evaluation", "checkpoint"):
            with clock.phase(phase):
                counting.all_reduce(torch.zeros(1000))
        return {name: entry.bytes for name, entry in counting.traffic.items()}

    assert ThreadGroup(2, 20).run(work) == [{"all_reduce": 40}] * 2


def test_the_record_of_a_run_has_its_steps_alone(here: Path) -> None:
    """The same on shm and torch, though on torch the parameters are broadcast when a run begins."""
    found = []
    for transport in ("shm", "torch"):
        record = mh.train(
            "quadratic", workers=2, epochs=1, transport=transport, out=here / transport, quiet=True
        )
        found.append([sum(each["bytes"] for each in rank.values()) / record.steps for rank in record.traffic])
    assert found[0] == found[1]
    assert found[0][0] == found[0][1] > 0
