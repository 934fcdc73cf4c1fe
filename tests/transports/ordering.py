"""Every order in which the memory operations of a few threads can take effect, on processors of three kinds.

A program is one way through a thread's code: stores, loads, fences, and the kernel's futex calls. Where the
code branches on what it loads, the load says which values lead this way; other ways are other programs. What
may happen out of order within a thread:

    sc      nothing
    tso     a load before an earlier store (x86: stores wait in a buffer, which the thread itself reads first)
    weak    any two operations on different places, but no store before the branch that leads to it (ARM)

A fence keeps all that is before it from all that is behind it. `wait` is the kernel's: it compares and falls
asleep in one, after all that came before; `wake` wakes all who sleep there, after all that came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Model = Literal["sc", "tso", "weak"]
Kind = Literal["store", "load", "fence", "wait", "wake"]


class Op(NamedTuple):
    """One operation; a load's and a wait's `register` is the number of the load among the thread's loads."""

    kind: Kind
    place: str = ""
    value: int = 0
    register: int = -1
    least: int | None = None  # the values with which the code goes this way ...
    below: int | None = None  # ... None: with any, and nothing depends on it

    @property
    def branches(self) -> bool:
        """Whether the way that the code goes depends on it."""
        return self.least is not None or self.below is not None

    def leads_here(self, value: int) -> bool:
        """Whether the code goes this way."""
        return (self.least is None or value >= self.least) and (self.below is None or value < self.below)


Program = Sequence[Op]


class State(NamedTuple):
    """Between two operations."""

    done: tuple[int, ...]  # a bit for each operation, by thread
    memory: tuple[tuple[str, int], ...]  # what is not zero
    registers: tuple[tuple[tuple[int, int], ...], ...]
    asleep: frozenset[int]


@dataclass
class Found:
    """What can come of it."""

    lost_wakeup: bool = False  # somebody sleeps, and nobody is left to wake it
    registers: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)  # at the end, by thread
    states: int = 0


def explore(programs: Sequence[Program], model: Model) -> Found:
    """Go through all orders."""
    found, seen = Found(), set[State]()
    left = [State((0,) * len(programs), (), ((),) * len(programs), frozenset())]
    while left:
        state = left.pop()
        if state in seen:
            continue
        seen.add(state)
        moves = _moves(programs, state, model)
        if moves:
            left += [after for after in (_after(programs, state, *move) for move in moves) if after]
        elif state.asleep:
            found.lost_wakeup = True
        else:
            found.registers.add(tuple(tuple(value for _, value in sorted(each)) for each in state.registers))
    found.states = len(seen)
    return found


def _moves(programs: Sequence[Program], state: State, model: Model) -> list[tuple[int, int]]:
    moves = []
    for thread, program in enumerate(programs):
        if thread in state.asleep:
            continue
        open_ = [number for number in range(len(program)) if not state.done[thread] >> number & 1]
        for place, number in enumerate(open_):
            if all(_passes(program[number], program[earlier], model) for earlier in open_[:place]):
                if program[number].kind == "fence":  # nobody sees it: it needs no turn of its own
                    return [(thread, number)]
                moves.append((thread, number))
            if program[number].kind in ("fence", "wait"):
                break
    return moves


def _passes(later: Op, earlier: Op, model: Model) -> bool:
    """Whether an operation may take effect before one that precedes it."""
    if model == "sc" or later.kind in ("fence", "wait", "wake") or earlier.kind in ("fence", "wait"):
        return False
    if later.kind == "load" and earlier.kind == "store":
        return True  # where the place is the same, the thread sees its own store
    if model == "tso" or later.place == earlier.place:
        return False
    return not (later.kind == "store" and earlier.branches)


def _after(programs: Sequence[Program], state: State, thread: int, number: int) -> State | None:
    """What is then; None where the code would have gone another way."""
    op, program = programs[thread][number], programs[thread]
    memory, registers, asleep = dict(state.memory), list(state.registers), state.asleep
    done = list(state.done)
    if op.kind == "load":
        own = [
            each.value
            for earlier, each in enumerate(program[:number])
            if each.kind == "store" and each.place == op.place and not state.done[thread] >> earlier & 1
        ]
        value = own[-1] if own else memory.get(op.place, 0)
        if not op.leads_here(value):
            return None
        registers[thread] = (*registers[thread], (op.register, value))
    elif op.kind == "store":
        memory[op.place] = op.value
    elif op.kind == "wait":
        if memory.get(op.place, 0) == dict(registers[thread])[op.register]:
            return state._replace(asleep=asleep | {thread})
    elif op.kind == "wake":
        for other in asleep:
            waits = _sleeps_in(programs[other], state.done[other])
            if programs[other][waits].place == op.place:
                done[other] |= 1 << waits
                asleep -= {other}
    done[thread] |= 1 << number
    held = tuple(sorted((place, value) for place, value in memory.items() if value))
    return State(tuple(done), held, tuple(registers), asleep)


def _sleeps_in(program: Program, done: int) -> int:
    return next(number for number in range(len(program)) if not done >> number & 1)


class Read(int):
    """A number that knows which load it came from."""

    register: int


class Tape:
    """Records the operations of real code that runs against it, one way through it at a time."""

    def __init__(self) -> None:
        self.program: list[Op] = []
        self._loads = 0

    def store(self, place: str, value: int) -> None:
        """What others can see."""
        self.program.append(Op("store", place, value))

    def load(
        self, place: str, answer: int = 0, *, least: int | None = None, below: int | None = None
    ) -> Read:
        """The code is answered what leads it this way."""
        self.program.append(Op("load", place, register=self._loads, least=least, below=below))
        read = Read(answer)
        read.register = self._loads
        self._loads += 1
        return read

    def fence(self) -> None:
        """As `waiting.fence`."""
        self.program.append(Op("fence"))

    def futex(self, place: str, operation: int, value: Any, *_: Any) -> int:
        """As the system call: 0 is to wait, 1 to wake."""
        self.program.append(Op("wake", place) if operation else Op("wait", place, register=value.register))
        return 0


def without_fences(program: Program) -> list[Op]:
    """The same, had nobody thought of it."""
    return [op for op in program if op.kind != "fence"]


def without_fence(program: Program, number: int) -> list[Op]:
    """The same without one of them."""
    fences = [place for place, op in enumerate(program) if op.kind == "fence"]
    return [op for place, op in enumerate(program) if place != fences[number]]
