"""Futex events, slots, barriers and mailboxes on a processor that reorders writes and reads.

The real code runs against a recorder of what it does to shared memory. Then all orders in which that can take
effect are explored (ordering.py). Removing a fence from the code fails a test on any machine.
"""

from __future__ import annotations

import itertools
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from manyhands.strategies.pipeline import stage_link
from manyhands.strategies.pipeline.stage_link import LinkSize, SlotLink
from manyhands.transports import tensor_bytes
from manyhands.transports.shm import futex, mailbox, sync_flags
from manyhands.transports.shm.futex import FutexEvent
from manyhands.transports.shm.mailbox import Mailboxes
from manyhands.transports.shm.sync_flags import SyncFlags
from transports.ordering import Model, Op, Outcomes, Program, Recorder, explore, without_fence, without_fences

MODELS: tuple[Model, ...] = ("sc", "tso", "weak")
Record = Callable[[Callable[[Recorder], Any]], list[Op]]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """The operations of one path through real code."""

    def run(code: Callable[[Recorder], Any]) -> list[Op]:
        recorder = Recorder()
        for module in (futex, stage_link, sync_flags, mailbox):
            monkeypatch.setattr(module, "fence", recorder.fence)
        code(recorder)
        return recorder.program

    return run


def outcomes(threads: Sequence[Sequence[Program]], model: Model) -> Outcomes:
    """The outcomes of all combinations of paths, one per thread."""
    total = Outcomes()
    for programs in itertools.product(*threads):
        found = explore(programs, model)
        total.lost_wakeup |= found.lost_wakeup
        total.registers |= found.registers
        total.states += found.states
    return total


# ---------------------------------------------------------------------- the checker itself
def store(location: str, value: int = 1) -> Op:
    return Op("store", location, value)


def load(location: str, register: int = 0, **bounds: int) -> Op:
    return Op("load", location, register=register, **bounds)


FENCE = Op("fence")
LITMUS: dict[str, tuple[list[list[Op]], tuple[tuple[int, ...], ...], tuple[Model, ...]]] = {
    "store buffering": (
        [[store("x"), load("y")], [store("y"), load("x")]],
        ((0,), (0,)),
        ("tso", "weak"),
    ),
    "message passing": (
        [[store("data"), store("flag")], [load("flag"), load("data", 1)]],
        ((), (1, 0)),
        ("weak",),
    ),
    "message passing, the reader fenced": (
        [[store("data"), store("flag")], [load("flag"), FENCE, load("data", 1)]],
        ((), (1, 0)),
        ("weak",),
    ),
    "message passing, the writer fenced": (
        [[store("data"), FENCE, store("flag")], [load("flag"), load("data", 1)]],
        ((), (1, 0)),
        ("weak",),
    ),
    "message passing, both fenced": (
        [[store("data"), FENCE, store("flag")], [load("flag"), FENCE, load("data", 1)]],
        ((), (1, 0)),
        (),
    ),
    "message passing, after a branch": (  # a branch holds back stores, not loads
        [[store("data"), FENCE, store("flag")], [load("flag", least=1), load("data", 1)]],
        ((), (1, 0)),
        ("weak",),
    ),
    "load buffering": (
        [[load("x"), store("y")], [load("y"), store("x")]],
        ((1,), (1,)),
        ("weak",),
    ),
    "load buffering, after a branch": (
        [[load("x", least=0), store("y")], [load("y", least=0), store("x")]],
        ((1,), (1,)),
        (),
    ),
    "one location is read in order": ([[store("x")], [load("x"), load("x", 1)]], ((), (1, 0)), ()),
    "one's own store is seen": ([[store("x"), load("x")], [store("y")]], ((0,), ()), ()),
}


@pytest.mark.parametrize("name", LITMUS)
def test_the_checker_knows_the_litmus_tests(name: str) -> None:
    """Known outcomes of known programs: which processors show the odd one."""
    programs, odd, allowed = LITMUS[name]
    assert [model for model in MODELS if odd in explore(programs, model).registers] == list(allowed)


def test_the_checker_sees_a_sleeper() -> None:
    """Compare and sleep are one: a wake between the two cannot be missed; without a change it can."""
    sleeper = [load("word", below=1), Op("wait", "word", register=0)]
    assert not explore([sleeper, [store("word"), Op("wake", "word")]], "sc").lost_wakeup
    assert explore([sleeper, [Op("wake", "word")]], "sc").lost_wakeup
    assert explore([sleeper, [Op("wake", "word"), store("word")]], "sc").lost_wakeup


# ---------------------------------------------------------------------- the futex event
class Word:
    """A word of shared memory that is recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def value(self) -> int:
        return self._recorder.load("word")

    @value.setter
    def value(self, value: int) -> None:
        self._recorder.store("word", value)


def recorded_event(recorder: Recorder, rank: int) -> FutexEvent:
    """A real event whose word and system call are recorded."""
    made: Any = FutexEvent(mmap.mmap(-1, 4096), 0, rank, 3)
    made._word, made._address, made._call = Word(recorder), "word", recorder.futex
    assert isinstance(made, FutexEvent)
    return made


def notifies(record: Record, rank: int, location: str) -> list[Op]:
    """Change something and notify."""

    def code(recorder: Recorder) -> None:
        recorder.store(location, 1)
        recorded_event(recorder, rank).notify()

    return record(code)


def waits(record: Record, misses: Sequence[int], locations: Sequence[str]) -> list[Op]:
    """Wait for one change after the other, each found after `misses` checks that fail."""

    def code(recorder: Recorder) -> None:
        mine = recorded_event(recorder, 0)
        for location, failing in zip(locations, misses, strict=True):
            checks = deque([*[(0, None, 1)] * failing, (1, 1, None)])

            def ready(location: str = location, checks: deque[Any] = checks) -> bool:
                answer, least, below = checks.popleft()
                return bool(recorder.load(location, answer, least=least, below=below))

            assert mine.wait_for(ready, 60.0)

    return record(code)


def one_notification(record: Record) -> tuple[list[Op], list[list[Op]]]:
    return notifies(record, 1, "a"), [waits(record, [misses], ["a"]) for misses in range(4)]


def test_no_notification_is_lost(record: Record) -> None:
    notifier, waiter = one_notification(record)
    for model in MODELS:
        found = outcomes([[notifier], waiter], model)
        assert not found.lost_wakeup
        assert found.registers  # and the waiter does go on


def test_without_fences_a_notification_is_lost(record: Record) -> None:
    """As it once was: not on x86, which keeps the order of writes and of reads, but on ARM."""
    notifier, waiter = one_notification(record)
    bare = [[without_fences(notifier)], [without_fences(way) for way in waiter]]
    assert [model for model in MODELS if outcomes(bare, model).lost_wakeup] == ["weak"]


def test_each_fence_is_needed(record: Record) -> None:
    notifier, waiter = one_notification(record)
    checked = waiter[1]  # one check that fails: one fence per check
    assert (notifier.count(FENCE), checked.count(FENCE)) == (1, 2)
    assert explore([without_fence(notifier, 0), checked], "weak").lost_wakeup
    assert explore([notifier, without_fence(checked, 0)], "weak").lost_wakeup


def test_no_notification_is_lost_with_two_waiters_or_two_notifiers(record: Record) -> None:
    notifier, waiter = one_notification(record)
    assert not outcomes([[notifier], waiter[:3], waiter[:3]], "weak").lost_wakeup
    both = [waits(record, misses, "ab") for misses in itertools.product(range(3), range(3))]
    assert not outcomes([[notifier], [notifies(record, 2, "b")], both], "weak").lost_wakeup


def test_no_sleep_is_longer_than_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline once slept for its whole timeout of half an hour after a lost notification."""
    spans: list[float] = []
    made: Any = FutexEvent(mmap.mmap(-1, 4096), 0, 0, 1)

    def futex(address: int, operation: int, value: int, span: Any, *_: Any) -> int:
        spans.append(span._obj.seconds + span._obj.nanoseconds * 1e-9)
        return 0

    made._call = futex
    checks = iter([False] * 3 + [True])
    assert made.wait_for(lambda: next(checks), 1800.0)
    assert len(spans) == 3
    assert max(spans) <= 0.05


# ---------------------------------------------------------------------- slots between stages
COUNTERS = {stage_link._SENT: "sent", stage_link._RELEASED: "released"}


class Counters:
    """The recorded counters of a link. What they return leads the code to the path of the test."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.checks: deque[tuple[int, int | None, int | None]] = deque()

    def __getitem__(self, which: int) -> int:
        answer, least, below = self.checks.popleft()
        return self._recorder.load(COUNTERS[which], answer, least=least, below=below)

    def __setitem__(self, which: int, value: int) -> None:
        self._recorder.store(COUNTERS[which], value)

    def expect(self, value: int, misses: int) -> None:
        """The next wait is for this value, found after `misses` checks that fail."""
        self.checks.extend([*[(value - 1, None, value)] * misses, (value, value, None)])


class Host:
    """The transport of one end of a link."""

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self._recorder, self._event = recorder, recorded_event(recorder, rank)
        self._copies = 0

    def wait_for(self, ready: Callable[[], bool], seconds: float, what: str) -> bool:
        return self._event.wait_for(ready, seconds)

    def notify(self) -> None:
        self._event.notify()

    def copy_shared(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        self._copies += 1
        self._recorder.store("data", self._copies)


def link(recorder: Recorder, rank: int) -> tuple[SlotLink, Counters]:
    """A real link with one slot, whose counters are recorded."""
    room, counters = LinkSize(1, 64), Counters(recorder)
    made: Any = SlotLink(Host(recorder, rank), torch.zeros(room.total, dtype=torch.uint8), room, "activation")
    made._counters = counters
    made._heads[0][:3] = [tensor_bytes.code(torch.float32), 1, 4]
    return made, counters


def puts(record: Record, *misses: int) -> list[Op]:
    """Put tensors, each when the only slot is free."""

    def code(recorder: Recorder) -> None:
        mine, counters = link(recorder, 0)
        for number, failing in enumerate(misses):
            counters.expect(number, failing)
            mine.put(torch.zeros(4))

    return record(code)


def takes(record: Record, *misses: int) -> list[Op]:
    """Take as many tensors, read each and free its slot."""

    def code(recorder: Recorder) -> None:
        mine, counters = link(recorder, 1)
        for number, failing in enumerate(misses, 1):
            counters.expect(number, failing)
            mine.take()
            recorder.load("data", number)
            mine.release()

    return record(code)


def received(receiver: Program, registers: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    numbers = [op.register for op in receiver if op.kind == "load" and op.location == "data"]
    return tuple(registers[1][number] for number in numbers)


def test_slots_hand_over_what_was_put(record: Record) -> None:
    """Neither end sleeps forever, and no slot is read before it is written or written before it is read."""
    for again, first, second in itertools.product(
        range(3), repeat=3
    ):  # checks that fail; from 2 on it may sleep
        sender, receiver = puts(record, 0, again), takes(record, first, second)
        found = explore([sender, receiver], "weak")
        assert not found.lost_wakeup
        assert {received(receiver, registers) for registers in found.registers} <= {(1, 2)}


def test_slots_without_fences_do_not(record: Record) -> None:
    sender, receiver = without_fences(puts(record, 0)), without_fences(takes(record, 2))
    found = explore([sender, receiver], "weak")
    assert found.lost_wakeup
    assert {received(receiver, registers) for registers in found.registers} > {(1,)}


# ---------------------------------------------------------------------- barriers
class Flags:
    """The recorded flags of a host. Each is read when it has reached the expected value."""

    def __init__(self, recorder: Recorder, expected: Callable[[int], int]) -> None:
        self._recorder, self._expected = recorder, expected

    def __getitem__(self, flag: int) -> int:
        value = self._expected(flag)
        return self._recorder.load(f"flag {flag}", value, least=value)

    def __setitem__(self, flag: int, value: int) -> None:
        self._recorder.store(f"flag {flag}", value)


def passes_barriers(record: Record, rank: int, size: int, again: bool = True) -> list[Op]:
    """Write own data, barrier, read the data of the next rank, barrier, write again."""

    def code(recorder: Recorder) -> None:
        made: Any = object.__new__(SyncFlags)
        made.flags = Flags(recorder, lambda flag: made._barriers)
        made._barriers, made._mine = 0, rank * sync_flags.WORDS
        made._others = tuple(peer * sync_flags.WORDS for peer in range(size) if peer != rank)
        recorder.store(f"data {rank}", 1)
        made.barrier()
        recorder.load(f"data {(rank + 1) % size}", 1)
        if again:
            made.barrier()
            recorder.store(f"data {rank}", 2)

    return record(code)


def read(program: Program, registers: tuple[int, ...], location: str) -> list[int]:
    return [
        registers[op.register] for op in program if op.kind == "load" and op.location.startswith(location)
    ]


@pytest.mark.parametrize(("size", "again"), [(2, True), (3, False)])
def test_a_barrier_separates_before_from_after(record: Record, size: int, again: bool) -> None:
    programs = [passes_barriers(record, rank, size, again) for rank in range(size)]
    for registers in (found := explore(programs, "weak")).registers:
        for program, mine in zip(programs, registers, strict=True):
            assert read(program, mine, "data") == [1]
    assert found.registers


def test_a_barrier_without_fences_does_not(record: Record) -> None:
    programs = [without_fences(passes_barriers(record, rank, 2)) for rank in range(2)]
    found = {read(programs[0], registers[0], "data")[0] for registers in explore(programs, "weak").registers}
    assert found > {1}


# ---------------------------------------------------------------------- mailboxes
class Slot:
    """A recorded slot of a ring, and any part of it."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __getitem__(self, part: slice) -> Slot:
        return self

    def copy_(self, message: Message) -> None:
        self.recorder.store("slot", message.number)


class Message:
    """A row of bytes, of which only the number matters."""

    def __init__(self, number: int) -> None:
        self.number = number

    def numel(self) -> int:
        return self.number

    def __getitem__(self, part: slice) -> Message:
        return self

    def copy_(self, slot: Slot) -> None:
        slot.recorder.load("slot", self.number)


SENT, SIZE, TAKEN = 0, 1, sync_flags.WORDS  # the flags of a pair whose line is the first


def boxes(recorder: Recorder, rank: int, expected: Callable[[int], int]) -> Any:
    """Real mailboxes of two ranks, whose ring from 0 to 1 has one slot."""
    made: Any = object.__new__(Mailboxes)
    made._sync = object.__new__(SyncFlags)
    made._sync.flags = Flags(recorder, expected)
    made._first_line, made._rank, made._size = -mailbox.LINES, rank, 2  # pair 1 begins at line 0
    made._sent, made._taken = [0, 0], [0, 0]
    made._slots = {1: [Slot(recorder)]}
    return made


def mailed(record: Record) -> tuple[list[Op], list[Op]]:
    """Two messages through one slot."""

    def send(recorder: Recorder) -> None:
        mine = boxes(recorder, 0, lambda flag: mine._sent[1])
        for number in (1, 2):
            mine.send(Message(number), 1)

    def receive(recorder: Recorder) -> None:
        mine = boxes(recorder, 1, lambda flag: mine._taken[0] + 1)
        for number in (1, 2):
            mine.recv(Message(number), 0)

    return record(send), record(receive)


def test_mailboxes_deliver_what_was_sent(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "SLOTS", 1)
    sender, receiver = mailed(record)
    found = explore([sender, receiver], "weak")
    assert {tuple(read(receiver, registers[1], "slot")) for registers in found.registers} == {(1, 2)}
    bare = [without_fences(sender), without_fences(receiver)]
    found = explore(bare, "weak")
    assert {tuple(read(bare[1], registers[1], "slot")) for registers in found.registers} > {(1, 2)}
