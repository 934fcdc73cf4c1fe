"""A memory-model checker: all orders in which the memory operations of a few threads can take effect.

A program is one path through the code of a thread: stores, loads, fences, and futex calls of the kernel. If
the code branches on a loaded value, the load says which values lead to this path; other paths are other
programs. What may happen out of order within a thread depends on the memory model:

    sc      nothing
    tso     a load before an earlier store (x86: stores wait in a buffer, which the thread itself reads first)
    weak    any two operations on different locations, but no store before the branch it depends on (ARM)

Operations before a fence happen before those after it. `wait` is the kernel's: it compares and falls asleep
atomically, after all earlier operations. `wake` wakes all sleepers, after all earlier operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Model = Literal["sc", "tso", "weak"]
Kind = Literal["store", "load", "fence", "wait", "wake"]


class Op(NamedTuple):
    """One operation. The `register` of a load or wait is the index of the load in its thread."""

    kind: Kind
    location: str = ""
    value: int = 0
    register: int = -1
    least: int | None = None  # the values that lead to this path; None: any value,
    below: int | None = None  # and no branch depends on it

    @property
    def branches(self) -> bool:
        """Whether the path depends on it."""
        return self.least is not None or self.below is not None

    def leads_to_path(self, value: int) -> bool:
        """Whether this value leads to this path."""
        return (self.least is None or value >= self.least) and (self.below is None or value < self.below)


Program = Sequence[Op]


class State(NamedTuple):
    """The state of all threads and of memory between two operations."""

    done: tuple[int, ...]  # one bit per operation, by thread
    memory: tuple[tuple[str, int], ...]  # nonzero values
    registers: tuple[tuple[tuple[int, int], ...], ...]
    asleep: frozenset[int]


@dataclass
class Outcomes:
    """All possible outcomes."""

    lost_wakeup: bool = False  # a thread sleeps, and no thread is left to wake it
    registers: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)  # at the end, by thread
    states: int = 0


def explore(programs: Sequence[Program], model: Model) -> Outcomes:
    """Explore all orders."""
    found, visited = Outcomes(), set[State]()
    pending = [State((0,) * len(programs), (), ((),) * len(programs), frozenset())]
    while pending:
        state = pending.pop()
        if state in visited:
            continue
        visited.add(state)
        moves = _moves(programs, state, model)
        if moves:
            pending += [after for after in (_after(programs, state, *move) for move in moves) if after]
        elif state.asleep:
            found.lost_wakeup = True
        else:
            found.registers.add(tuple(tuple(value for _, value in sorted(each)) for each in state.registers))
    found.states = len(visited)
    return found


def _moves(programs: Sequence[Program], state: State, model: Model) -> list[tuple[int, int]]:
    moves = []
    for thread, program in enumerate(programs):
        if thread in state.asleep:
            continue
        open_ = [number for number in range(len(program)) if not state.done[thread] >> number & 1]
        for index, number in enumerate(open_):
            if all(_may_overtake(program[number], program[earlier], model) for earlier in open_[:index]):
                if program[number].kind == "fence":  # it has no visible effect, so its order does not matter
                    return [(thread, number)]
                moves.append((thread, number))
            if program[number].kind in ("fence", "wait"):
                break
    return moves


def _may_overtake(later: Op, earlier: Op, model: Model) -> bool:
    """Whether an operation may take effect before one that precedes it in its thread."""
    if model == "sc" or later.kind in ("fence", "wait", "wake") or earlier.kind in ("fence", "wait"):
        return False
    if later.kind == "load" and earlier.kind == "store":
        return True  # from the same location, the thread reads its own store
    if model == "tso" or later.location == earlier.location:
        return False
    return not (later.kind == "store" and earlier.branches)


def _after(programs: Sequence[Program], state: State, thread: int, number: int) -> State | None:
    """The next state, or None if the code would have taken another path."""
    op, program = programs[thread][number], programs[thread]
    memory, registers, asleep = dict(state.memory), list(state.registers), state.asleep
    done = list(state.done)
    if op.kind == "load":
        own = [
            each.value
            for earlier, each in enumerate(program[:number])
            if each.kind == "store" and each.location == op.location and not state.done[thread] >> earlier & 1
        ]
        value = own[-1] if own else memory.get(op.location, 0)
        if not op.leads_to_path(value):
            return None
        registers[thread] = (*registers[thread], (op.register, value))
    elif op.kind == "store":
        memory[op.location] = op.value
    elif op.kind == "wait":
        if memory.get(op.location, 0) == dict(registers[thread])[op.register]:
            return state._replace(asleep=asleep | {thread})
    elif op.kind == "wake":
        for other in asleep:
            waits = _sleeps_in(programs[other], state.done[other])
            if programs[other][waits].location == op.location:
                done[other] |= 1 << waits
                asleep -= {other}
    done[thread] |= 1 << number
    nonzero = tuple(sorted((location, value) for location, value in memory.items() if value))
    return State(tuple(done), nonzero, tuple(registers), asleep)


def _sleeps_in(program: Program, done: int) -> int:
    return next(number for number in range(len(program)) if not done >> number & 1)


class Read(int):
    """A loaded value with the index of its load."""

    register: int


class Recorder:
    """Records the operations of real code, one path at a time."""

    def __init__(self) -> None:
        self.program: list[Op] = []
        self._loads = 0

    def store(self, location: str, value: int) -> None:
        """Record a store."""
        self.program.append(Op("store", location, value))

    def load(
        self, location: str, answer: int = 0, *, least: int | None = None, below: int | None = None
    ) -> Read:
        """Record a load and return the value that leads to this path."""
        self.program.append(Op("load", location, register=self._loads, least=least, below=below))
        read = Read(answer)
        read.register = self._loads
        self._loads += 1
        return read

    def fence(self) -> None:
        """Record a call of `waiting.fence`."""
        self.program.append(Op("fence"))

    def futex(self, location: str, operation: int, value: Any, *_: Any) -> int:
        """Record the system call: operation 0 waits, 1 wakes."""
        self.program.append(
            Op("wake", location) if operation else Op("wait", location, register=value.register)
        )
        return 0


def without_fences(program: Program) -> list[Op]:
    """The program without its fences."""
    return [op for op in program if op.kind != "fence"]


def without_fence(program: Program, number: int) -> list[Op]:
    """The program without one of its fences."""
    fences = [index for index, op in enumerate(program) if op.kind == "fence"]
    return [op for index, op in enumerate(program) if index != fences[number]]
