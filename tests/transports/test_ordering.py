"""Bell, slots, meetings and mailboxes on a processor that changes the order of writes and reads.

The real code is run against a tape that records what it does to shared memory; then all orders in which that
can take effect are gone through (ordering.py). To take a fence out of the code fails a test on any machine.
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
from transports.ordering import Found, Model, Op, Program, Tape, explore, without_fence, without_fences

MODELS: tuple[Model, ...] = ("sc", "tso", "weak")
Record = Callable[[Callable[[Tape], Any]], list[Op]]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """The operations of one way through real code."""

    def run(code: Callable[[Tape], Any]) -> list[Op]:
        tape = Tape()
        for module in (futex, stage_link, sync_flags, mailbox):
            monkeypatch.setattr(module, "fence", tape.fence)
        code(tape)
        return tape.program

    return run


def outcomes(threads: Sequence[Sequence[Program]], model: Model) -> Found:
    """Of all ways through each thread's code, with all of the others'."""
    total = Found()
    for programs in itertools.product(*threads):
        found = explore(programs, model)
        total.lost_wakeup |= found.lost_wakeup
        total.registers |= found.registers
        total.states += found.states
    return total


# ---------------------------------------------------------------------- the checker itself
def store(place: str, value: int = 1) -> Op:
    return Op("store", place, value)


def load(place: str, register: int = 0, **bounds: int) -> Op:
    return Op("load", place, register=register, **bounds)


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
    "one place is read in order": ([[store("x")], [load("x"), load("x", 1)]], ((), (1, 0)), ()),
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


# ---------------------------------------------------------------------- the bell
class Word:
    """A word of shared memory, on the tape."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    @property
    def value(self) -> int:
        return self._tape.load("word")

    @value.setter
    def value(self, value: int) -> None:
        self._tape.store("word", value)


def taped(tape: Tape, rank: int) -> FutexEvent:
    """A real bell, whose word and whose system call are on the tape."""
    made: Any = FutexEvent(mmap.mmap(-1, 4096), 0, rank, 3)
    made._word, made._address, made._call = Word(tape), "word", tape.futex
    assert isinstance(made, FutexEvent)
    return made


def rings(record: Record, rank: int, place: str) -> list[Op]:
    """Say that something has changed."""

    def code(tape: Tape) -> None:
        tape.store(place, 1)
        taped(tape, rank).ring()

    return record(code)


def waits(record: Record, misses: Sequence[int], places: Sequence[str]) -> list[Op]:
    """Wait for one change after the other, each found at the look after so many in vain."""

    def code(tape: Tape) -> None:
        mine = taped(tape, 0)
        for place, in_vain in zip(places, misses, strict=True):
            looks = deque([*[(0, None, 1)] * in_vain, (1, 1, None)])

            def ready(place: str = place, looks: deque[Any] = looks) -> bool:
                answer, least, below = looks.popleft()
                return bool(tape.load(place, answer, least=least, below=below))

            assert mine.until(ready, 60.0)

    return record(code)


def one_ring(record: Record) -> tuple[list[Op], list[list[Op]]]:
    return rings(record, 1, "a"), [waits(record, [misses], ["a"]) for misses in range(4)]


def test_no_ring_is_lost(record: Record) -> None:
    ringer, waiter = one_ring(record)
    for model in MODELS:
        found = outcomes([[ringer], waiter], model)
        assert not found.lost_wakeup
        assert found.registers  # and it does go on


def test_without_fences_a_ring_is_lost(record: Record) -> None:
    """As it was: not on x86, which keeps the order of writes and of reads, but on ARM."""
    ringer, waiter = one_ring(record)
    bare = [[without_fences(ringer)], [without_fences(way) for way in waiter]]
    assert [model for model in MODELS if outcomes(bare, model).lost_wakeup] == ["weak"]


def test_each_fence_is_needed(record: Record) -> None:
    ringer, waiter = one_ring(record)
    looked = waiter[1]  # in vain once: a fence for each look
    assert (ringer.count(FENCE), looked.count(FENCE)) == (1, 2)
    assert explore([without_fence(ringer, 0), looked], "weak").lost_wakeup
    assert explore([ringer, without_fence(looked, 0)], "weak").lost_wakeup


def test_no_ring_is_lost_where_two_wait_or_two_ring(record: Record) -> None:
    ringer, waiter = one_ring(record)
    assert not outcomes([[ringer], waiter[:3], waiter[:3]], "weak").lost_wakeup
    both = [waits(record, misses, "ab") for misses in itertools.product(range(3), range(3))]
    assert not outcomes([[ringer], [rings(record, 2, "b")], both], "weak").lost_wakeup


def test_no_sleep_is_longer_than_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline once slept for its whole patience of half an hour where a ring was lost."""
    spans: list[float] = []
    made: Any = FutexEvent(mmap.mmap(-1, 4096), 0, 0, 1)

    def futex(address: int, operation: int, value: int, span: Any, *_: Any) -> int:
        spans.append(span._obj.seconds + span._obj.nanoseconds * 1e-9)
        return 0

    made._call = futex
    looks = iter([False] * 3 + [True])
    assert made.until(lambda: next(looks), 1800.0)
    assert len(spans) == 3
    assert max(spans) <= 0.05


# ---------------------------------------------------------------------- slots between stages
COUNTERS = {stage_link._SENT: "sent", stage_link._RELEASED: "released"}


class Counters:
    """The counters of a link, on the tape; what is read there leads the code where the test wants it."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.looks: deque[tuple[int, int | None, int | None]] = deque()

    def __getitem__(self, which: int) -> int:
        answer, least, below = self.looks.popleft()
        return self._tape.load(COUNTERS[which], answer, least=least, below=below)

    def __setitem__(self, which: int, value: int) -> None:
        self._tape.store(COUNTERS[which], value)

    def until(self, value: int, in_vain: int) -> None:
        """The next wait is for this value, found at the look after so many."""
        self.looks.extend([*[(value - 1, None, value)] * in_vain, (value, value, None)])


class Host:
    """The transport of one end of a link."""

    def __init__(self, tape: Tape, rank: int) -> None:
        self._tape, self._bell = tape, taped(tape, rank)
        self._copies = 0

    def until(self, ready: Callable[[], bool], seconds: float, what: str) -> bool:
        return self._bell.until(ready, seconds)

    def ring(self) -> None:
        self._bell.ring()

    def copy_shared(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        self._copies += 1
        self._tape.store("data", self._copies)


def link(tape: Tape, rank: int) -> tuple[SlotLink, Counters]:
    """A real link with one slot, whose counters are on the tape."""
    room, counters = LinkSize(1, 64), Counters(tape)
    made: Any = SlotLink(Host(tape, rank), torch.zeros(room.total, dtype=torch.uint8), room, "activation")
    made._counters = counters
    made._heads[0][:3] = [tensor_bytes.code(torch.float32), 1, 4]
    return made, counters


def puts(record: Record, *in_vain: int) -> list[Op]:
    """Tensors, each when the only slot is free."""

    def code(tape: Tape) -> None:
        mine, counters = link(tape, 0)
        for number, misses in enumerate(in_vain):
            counters.until(number, misses)
            mine.put(torch.zeros(4))

    return record(code)


def takes(record: Record, *in_vain: int) -> list[Op]:
    """As many tensors, each read and given back."""

    def code(tape: Tape) -> None:
        mine, counters = link(tape, 1)
        for number, misses in enumerate(in_vain, 1):
            counters.until(number, misses)
            mine.take()
            tape.load("data", number)
            mine.release()

    return record(code)


def handed_over(receiver: Program, registers: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    numbers = [op.register for op in receiver if op.kind == "load" and op.place == "data"]
    return tuple(registers[1][number] for number in numbers)


def test_slots_hand_over_what_was_put(record: Record) -> None:
    """Neither end sleeps for good, no slot is read before it is written or written before it is read."""
    for again, first, second in itertools.product(
        range(3), repeat=3
    ):  # looks in vain; from 2 on it may sleep
        sender, receiver = puts(record, 0, again), takes(record, first, second)
        found = explore([sender, receiver], "weak")
        assert not found.lost_wakeup
        assert {handed_over(receiver, registers) for registers in found.registers} <= {(1, 2)}


def test_slots_without_fences_do_not(record: Record) -> None:
    sender, receiver = without_fences(puts(record, 0)), without_fences(takes(record, 2))
    found = explore([sender, receiver], "weak")
    assert found.lost_wakeup
    assert {handed_over(receiver, registers) for registers in found.registers} > {(1,)}


# ---------------------------------------------------------------------- meetings
class Flags:
    """The flags of a host, on the tape; each is read when it has come as far as is waited for."""

    def __init__(self, tape: Tape, expected: Callable[[int], int]) -> None:
        self._tape, self._expected = tape, expected

    def __getitem__(self, flag: int) -> int:
        value = self._expected(flag)
        return self._tape.load(f"flag {flag}", value, least=value)

    def __setitem__(self, flag: int, value: int) -> None:
        self._tape.store(f"flag {flag}", value)


def meets(record: Record, rank: int, size: int, again: bool = True) -> list[Op]:
    """Write one's own, meet, read the next one's, meet again, write again."""

    def code(tape: Tape) -> None:
        made: Any = object.__new__(SyncFlags)
        made.flags = Flags(tape, lambda flag: made._arrived)
        made._arrived, made._mine = 0, rank * sync_flags.WORDS
        made._others = tuple(peer * sync_flags.WORDS for peer in range(size) if peer != rank)
        tape.store(f"data {rank}", 1)
        made.meet()
        tape.load(f"data {(rank + 1) % size}", 1)
        if again:
            made.meet()
            tape.store(f"data {rank}", 2)

    return record(code)


def read(program: Program, registers: tuple[int, ...], place: str) -> list[int]:
    return [registers[op.register] for op in program if op.kind == "load" and op.place.startswith(place)]


@pytest.mark.parametrize(("size", "again"), [(2, True), (3, False)])
def test_a_meeting_divides_before_from_after(record: Record, size: int, again: bool) -> None:
    programs = [meets(record, rank, size, again) for rank in range(size)]
    for registers in (found := explore(programs, "weak")).registers:
        for program, mine in zip(programs, registers, strict=True):
            assert read(program, mine, "data") == [1]
    assert found.registers


def test_a_meeting_without_fences_does_not(record: Record) -> None:
    programs = [without_fences(meets(record, rank, 2)) for rank in range(2)]
    found = {read(programs[0], registers[0], "data")[0] for registers in explore(programs, "weak").registers}
    assert found > {1}


# ---------------------------------------------------------------------- mailboxes
class Slot:
    """A slot of a ring, on the tape, and any part of it."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def __getitem__(self, part: slice) -> Slot:
        return self

    def copy_(self, message: Message) -> None:
        self.tape.store("slot", message.number)


class Message:
    """A row of bytes, of which only its number matters."""

    def __init__(self, number: int) -> None:
        self.number = number

    def numel(self) -> int:
        return self.number

    def __getitem__(self, part: slice) -> Message:
        return self

    def copy_(self, slot: Slot) -> None:
        slot.tape.load("slot", self.number)


SENT, SIZE, TAKEN = 0, 1, sync_flags.WORDS  # the flags of a pair, where its line is the first


def boxes(tape: Tape, rank: int, expected: Callable[[int], int]) -> Any:
    """Real mailboxes of two ranks, whose ring from 0 to 1 has one slot."""
    made: Any = object.__new__(Mailboxes)
    made._control = object.__new__(SyncFlags)
    made._control.flags = Flags(tape, expected)
    made._first_line, made._rank, made._size = -mailbox.LINES, rank, 2  # pair 1 begins at line 0
    made._sent, made._taken = [0, 0], [0, 0]
    made._slots = {1: [Slot(tape)]}
    return made


def mailed(record: Record) -> tuple[list[Op], list[Op]]:
    """Two messages through one slot."""

    def send(tape: Tape) -> None:
        mine = boxes(tape, 0, lambda flag: mine._sent[1])
        for number in (1, 2):
            mine.send(Message(number), 1)

    def receive(tape: Tape) -> None:
        mine = boxes(tape, 1, lambda flag: mine._taken[0] + 1)
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
