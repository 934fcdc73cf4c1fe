"""Wrappers pass the suite as what they wrap does, and do what they are for."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyhands.engine.fault_injection.faults import Fault, ScriptedError
from manyhands.engine.fault_injection.faulty_transport import FaultyTransport
from manyhands.engine.timing.clock import Clock
from manyhands.engine.timing.traffic import CountingTransport
from manyhands.testing import delayed
from manyhands.testing.delayed import DelayedTransport
from manyhands.testing.transports import Rank, TransportSuite
from manyhands.transports.base import Transport, in_place
from manyhands.transports.solo import SoloTransport
from manyhands.transports.threads import ThreadGroup
from manyhands.transports.wrapper import TransportWrapper

NEVER = Fault("raise", 99, 0)


def wrapped(transport: Transport, function: Rank) -> Any:
    faulty = FaultyTransport(DelayedTransport(TransportWrapper(transport), 1e-6, 1e12), NEVER, lambda: 0)
    return function(CountingTransport(faulty, Clock()))


class TestAllWrappers(TransportSuite):
    """One in another, around threads on two pretended hosts."""

    sizes = (1, 2, 4)
    short = 0.2
    dies = staticmethod(lambda: None)

    def run_group(self, size: int, function: Rank, timeout: float = 30.0) -> list[Any]:
        hosts = "abab"[:size]
        return ThreadGroup(size, timeout, hosts=hosts).run(partial(wrapped, function=function))


def test_counting_counts() -> None:
    def work(transport: Transport) -> dict[str, tuple[int, int]]:
        clock = Clock()
        counted = CountingTransport(transport, clock)
        assert counted.current == ""
        for _ in range(3):
            counted.all_reduce(torch.zeros(10))
        counted.broadcast(torch.zeros(2))
        counted.all_gather(torch.zeros(transport.rank + 1))
        if transport.rank == 0:
            counted.send(torch.zeros(5), 1)
        else:
            counted.recv(torch.zeros(5), 0)
        counted.on_host.barrier()
        counted.across.barrier()
        counted.share("memory", 64)
        counted.add_shared([torch.zeros(4), torch.zeros(4)], torch.zeros(4))
        assert counted.current == ""
        assert counted.moves == sum(entry.calls for entry in counted.traffic.values()) == 10
        assert all(entry.seconds > 0 for entry in counted.traffic.values())
        spent = clock.stopped()
        assert spent["communication"] > 0
        assert spent["wait"] > 0
        return {name: (entry.calls, entry.bytes) for name, entry in counted.traffic.items()}

    both = {
        "all_reduce": (3, 120),
        "broadcast": (1, 8),
        "all_gather": (1, 12),
        "barrier": (2, 0),
        "share": (1, 0),
        "add_shared": (1, 16),
    }
    first, second = ThreadGroup(2).run(work)
    assert first == {**both, "send": (1, 20)}
    assert second == {**both, "recv": (1, 20)}


class Spying(TransportWrapper):
    """Notes what its owner says meanwhile."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.seen: list[str] = []

    def around(self, operation: str, nbytes: int, call: Any, *arguments: Any) -> Any:
        self.seen.append(self.owner.current)
        if operation == "recv":
            raise ScriptedError("no")
        return call(*arguments)


def test_counting_says_what_is_under_way() -> None:
    spy = Spying(SoloTransport())
    counted = spy.owner = CountingTransport(spy)
    for _ in range(1234):
        counted.barrier()
    counted.all_reduce(torch.zeros(1))
    assert spy.seen[-2:] == ["barrier 1,234", "all_reduce 1"]
    assert counted.current == ""
    with pytest.raises(ScriptedError):
        counted.recv(torch.zeros(1), 0)
    assert counted.current == "recv 1"  # where it failed
    assert counted.moves == 1235


def test_counting_changes_no_bit() -> None:
    def sums(transport: Transport, count: bool) -> bytes:
        tensor = torch.randn(10_000, generator=torch.Generator().manual_seed(transport.rank))
        (CountingTransport(transport, Clock()) if count else transport).all_reduce(tensor)
        return tensor.numpy().tobytes()

    plain, counted = (ThreadGroup(3).run(partial(sums, count=count)) for count in (False, True))
    assert plain == counted


def test_a_wrapper_gives_what_only_the_inner_has() -> None:
    inner = SoloTransport()
    inner.process_group = "a group"  # type: ignore[attr-defined]
    assert CountingTransport(inner).process_group == "a group"
    assert CountingTransport(inner).on_host.rank == 0
    with pytest.raises(AttributeError, match="nothing_of_that_kind"):
        _ = CountingTransport(inner).nothing_of_that_kind


def test_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slept for, not measured: a busy machine sleeps longer than it was asked to."""
    naps: dict[int, list[float]] = {0: [], 1: []}
    mine = threading.local()

    def sleep(delay: float) -> None:
        naps[mine.rank].append(delay)

    monkeypatch.setattr(delayed, "time", SimpleNamespace(sleep=sleep))

    def work(transport: Transport) -> None:
        mine.rank = transport.rank
        slow = DelayedTransport(transport, latency=0.02, bandwidth=1e6)
        slow.barrier()  # one message each
        slow.all_reduce(torch.zeros(10_000))  # two messages of 20 KB
        slow.add_shared([torch.zeros(10_000)], torch.zeros(10_000))  # memory

    ThreadGroup(2).run(work)
    assert naps == {rank: pytest.approx([0.02, 0.08]) for rank in (0, 1)}


def test_a_fault_strikes_where_it_is_due() -> None:
    """Rank 2 at step 3, on its way into a collective, also where it is another number on its host."""

    def work(transport: Transport) -> list[str]:
        step = [0]
        faulty = FaultyTransport(transport, Fault("raise", 2, 3), lambda: step[0])
        seen = []
        for step[0] in range(5):
            in_place(faulty.on_host, "put_shared", 8)  # nobody waits in there, so nothing happens
            try:
                faulty.on_host.share("memory", 8)
            except ScriptedError as error:
                seen.append(str(error))
                transport.on_host.share("memory", 8)
        return seen

    assert ThreadGroup(4, hosts="aabb").run(work) == [[], [], ["raised by script at rank 2, step 3"], []]
