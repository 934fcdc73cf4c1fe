"""From what is known of all workers to the one message: who is to blame, and what the others were doing.

Pure functions over what others have collected: nothing here asks the clock, a process or a file.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from manyhands.core.formatting import duration
from manyhands.core.rank_info import RankStatus
from manyhands.core.tracebacks import LOG_NOTE, headline
from manyhands.launchers.control.remote_calls import Failure

WAITING = ("communication", "wait")  # phases in which a worker stands still because another one does
TRACE_LINES = 8  # of a traceback whose whole is in a log
UNLOGGED_TRACE_LINES = 40  # of one that is nowhere else
STACK_LINES = 6
_SIGNALS = {
    "SIGKILL": "often: out of memory",
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "often: shared memory is full",
    "SIGILL": "an instruction this processor does not have",
    "SIGABRT": "native code gave up",
    "SIGFPE": "a fault in native arithmetic",
}
SIGNALS = {
    getattr(signal, name): means for name, means in _SIGNALS.items() if hasattr(signal, name)
}  # Windows has some of them


class Ending(NamedTuple):
    """How a process ended that should not have."""

    kind: Literal["signal", "exit", "lost"]
    number: int = 0


class CodePosition(NamedTuple):
    """A worker's answer to `where are you?`."""

    stack: str  # of its main thread, the innermost frame last
    waiting: bool  # whether that frame is one that waits for other workers


@dataclass
class WorkerState:
    """All that is known of one worker."""

    rank: int
    host: str = ""
    pid: int = 0
    status: RankStatus | None = None  # None: it never said
    still: float = 0.0  # seconds since anything moved
    silent: float = 0.0  # seconds since it was last heard of
    position: CodePosition | None = None  # None: it did not answer
    stopped: bool = False  # by SIGSTOP or a debugger
    began: bool = True  # whether it ever said hello
    returned: bool = False
    failure: Failure | None = None
    ending: Ending | None = None
    bad_at: float | None = None  # when its failure or ending was noticed
    log: Path | None = None
    wrote: bool = False  # whether there is anything of its own in it
    joins: bool = False  # in the place of one that was lost
    lost: bool = False  # and the others went on


def ending_of(wait_status: int) -> Ending:
    """What waitpid answered."""
    code = os.waitstatus_to_exitcode(wait_status)
    return Ending("signal", -code) if code < 0 else Ending("exit", code)


def first_cause(known: Iterable[WorkerState]) -> WorkerState:
    """Of several that failed or died at nearly the same time, the one the others failed because of."""
    bad = [one for one in known if one.bad_at is not None]
    first = min(bad, key=lambda one: (is_consequence(one), one.bad_at, one.rank))
    if is_ours(first):  # all of them may raise it: the lowest rank speaks
        return min((one for one in bad if is_ours(one)), key=lambda one: one.rank)
    return first


def is_consequence(one: WorkerState) -> bool:
    """Whether it only says that somebody else failed."""
    return one.ending is None and one.failure is not None and one.failure.kind == "peer"


def is_ours(one: WorkerState) -> bool:
    """Whether it raised one of our errors, which end a gang as they are."""
    return one.ending is None and one.failure is not None and one.failure.kind == "ours"


def failed(culprit: WorkerState, everyone: Sequence[WorkerState], seconds: float) -> str:
    """The message about a worker that raised or died; the others were stopped so many seconds later."""
    return "\n".join(_failed(culprit, len(everyone)) + _others({culprit.rank}, everyone, seconds))


def _failed(one: WorkerState, size: int) -> list[str]:
    """What it did; where a line of the user's own is to blame, that line comes before everything else."""
    failure = one.failure if one.ending is None else None
    if failure is None or not failure.own or failure.kind == "exit":
        return [f"{name(one, size)} {_deed(one)}{_at(one.status)}", *_left_words(one)]
    return [
        headline(failure.own, failure.name, failure.text),
        f"{name(one, size)} {_raised_it(failure)}{_at(one.status)}",
        *([f"{LOG_NOTE}{one.log}"] if one.log else _left_words(one)),
    ]


Why = Literal["silent", "busy", "astray", "behind", "nobody"]


class Blame(NamedTuple):
    """Who keeps a gang from moving; nobody where all of them wait for each other."""

    ranks: tuple[int, ...]
    why: Why


class Loss(NamedTuple):
    """What is said of a worker without which the others go on."""

    sentence: str
    details: list[str]  # the end of its traceback, where it stood, where its words are


def loss(
    one: WorkerState, size: int, why: Why | None = None, successor: tuple[int, int] | None = None
) -> Loss:
    """Of a worker that raised, died or (for this reason) hung; its successor's number, and of how many."""
    fate = "a new one takes its place ({} of {})".format(*successor) if successor else "the others go on"
    about = f"{name(one, size)} {_deed(one) if why is None else _standstill(one, why)}{_at(one.status)}"
    if why is None:
        return Loss(f"{about}; {fate}", _left_words(one))
    return Loss(f"{about}; it was killed and {fate}", _stack(one, "it was here:"))


def blame(everyone: Iterable[WorkerState]) -> Blame:
    """Of a gang that stands still: who does not answer, or does not wait, or is the furthest behind.

    Only workers that say what they do can be judged, and one that has returned keeps nobody waiting.
    """
    left = [one for one in everyone if _is_here(one) and one.status is not None]
    longest = max((one.still for one in left), default=0.0)
    stuck = [one for one in left if one.still >= longest / 2]  # who moved since is not what they wait for
    if silent := [one.rank for one in stuck if one.position is None]:
        return Blame(tuple(silent), "silent")
    loose = [one for one in stuck if one.position is not None and not one.position.waiting]
    if busy := [one.rank for one in loose if one.status is not None and one.status.phase not in WAITING]:
        return Blame(tuple(busy), "busy")
    if loose:
        return Blame(tuple(one.rank for one in loose), "astray")
    moves = {one.rank: one.status.moves for one in stuck if one.status is not None}
    if len(set(moves.values())) > 1:
        return Blame(tuple(rank for rank in moves if moves[rank] == min(moves.values())), "behind")
    return Blame((), "nobody")


def hung(found: Blame, everyone: Sequence[WorkerState], seconds: float) -> str:
    """The message about a gang that stands still; the workers were stopped so many seconds after."""
    left = [one for one in everyone if _is_here(one)]
    if not found.ranks:
        still = duration(min(one.still for one in left))
        groups = _groups(left, "are")
        if len(groups) == 1 and len(left) == len(everyone):
            doing = groups[0].partition(" are ")[2] or groups[0].partition(" is ")[2]
            lines = [f"all workers are {doing}: none of them has moved for {still}"]
        else:
            lines = [f"{'; '.join(groups)}: none of them has moved for {still}"]
        lines += _stack(left[0], "worker {rank} is here:")
        return "\n".join(lines + _others({one.rank for one in left}, everyone, seconds, len(left)))
    culprit = next(one for one in everyone if one.rank == found.ranks[0])
    lines = [f"{name(culprit, len(everyone))} {_standstill(culprit, found.why)}{_at(culprit.status)}"]
    lines += _stack(culprit, "it is here:")
    return "\n".join(lines + _others({culprit.rank}, everyone, seconds))


def missing(absent: Sequence[int], size: int, seconds: float, hint: str = "") -> str:
    """The message about workers that never came."""
    return f"{_workers(absent)} of {size} did not start within {duration(seconds)}{hint}"


def name(one: WorkerState, size: int) -> str:
    """`worker 1 of 4 (host gpu-2, pid 4242)`."""
    about = [f"host {one.host}"] if one.host else []
    about += [f"pid {one.pid}"] if one.pid else []
    return f"worker {one.rank} of {size}" + (f" ({', '.join(about)})" if about else "")


def ended(ending: Ending) -> str:
    """`was killed by signal 9 (SIGKILL, often: out of memory)`."""
    if ending.kind == "lost":
        return "was lost (its connection closed: killed, crashed or exited)"
    if ending.kind == "exit":
        return f"ended with exit code {ending.number}"
    try:
        known = signal.Signals(ending.number)
    except ValueError:
        return f"was killed by signal {ending.number}"
    hint = SIGNALS.get(known)
    return f"was killed by signal {ending.number} ({known.name}{', ' + hint if hint else ''})"


def raised(failure: Failure) -> str:
    """`raised ValueError: bad thing`."""
    if failure.kind == "exit":
        return ended(Ending("exit", failure.code))
    first = failure.text.strip().partition("\n")[0]
    what = f"raised {failure.name}: {first}" if first else f"raised {failure.name}"
    return f"{what} (out of memory)" if _is_memory(failure) and "out of memory" not in first.lower() else what


def _raised_it(failure: Failure) -> str:
    return "raised it (out of memory)" if _is_memory(failure) else "raised it"


def _is_memory(failure: Failure) -> bool:
    words = failure.text.lower()
    return "can't allocate memory" in words or "out of memory" in words or failure.name == "MemoryError"


def _deed(one: WorkerState) -> str:
    if one.ending is not None:
        return ended(one.ending) + ("" if one.began else " before it began")
    assert one.failure is not None
    return raised(one.failure)


def _standstill(one: WorkerState, why: Why) -> str:
    if why != "silent":
        return f"has been hanging for {duration(one.still)}"
    since = duration(max(one.silent, one.still))
    return f"has {'been stopped (SIGSTOP)' if one.stopped else 'not answered'} for {since}"


def _at(status: RankStatus | None) -> str:
    """`at step 1,204, in backward`, as far as it is known."""
    if status is None:
        return ""
    if status.phase == "starting":
        return " while it was starting"
    return f" at step {status.step:,}, in {status.operation or status.phase}"


def _left_words(one: WorkerState) -> list[str]:
    """The end of its traceback, or where to find what it wrote."""
    failure = one.failure if one.ending is None else None
    if failure is not None and failure.kind != "exit":
        return _trace(failure, one.log)
    return [f"what it wrote is in {one.log}"] if one.log is not None and one.wrote else []


def _trace(failure: Failure, log: Path | None) -> list[str]:
    lines = failure.trace.rstrip().splitlines()
    shown = lines[-(TRACE_LINES if log else UNLOGGED_TRACE_LINES) :]
    return [f"  {line}" for line in shown] + ([f"the whole traceback is in {log}"] if log else [])


def _stack(one: WorkerState, heading: str) -> list[str]:
    if one.position is None or not one.position.stack:
        return []
    lines = one.position.stack.rstrip().splitlines()[-STACK_LINES:]
    return [heading.format(rank=one.rank)] + [f"  {line}" for line in lines]


def _others(told: set[int], everyone: Sequence[WorkerState], seconds: float, stopped: int = 0) -> list[str]:
    """What the rest was doing, in groups, and when it was stopped."""
    rest = [one for one in everyone if one.rank not in told and not one.lost]
    groups = _groups([one for one in rest if one.returned or one.status is not None], "were")
    stopped += sum(not one.returned for one in rest)
    if stopped:
        mute = [one.rank for one in rest if not one.returned and one.status is None]
        told_of = bool(groups) or not mute
        who = (
            ("they were" if stopped > 1 else "it was") if told_of else f"{_workers(mute)} {_be(mute, 'were')}"
        )
        groups.append(f"{who} stopped after {duration(seconds)}")
    if lost := [one.rank for one in everyone if one.lost]:
        groups.append(f"{_workers(lost)} had been lost before")
    return ["; ".join(groups)] if groups else []


def _groups(some: Iterable[WorkerState], verb: Literal["are", "were"]) -> list[str]:
    """`workers 0, 2 were in forward at step 12`, one for each thing that is done."""
    doing: dict[str, list[int]] = {}
    for one in some:
        doing.setdefault(_doing(one), []).append(one.rank)
    return [
        f"{_workers(ranks)} had returned" if what == "" else f"{_workers(ranks)} {_be(ranks, verb)} {what}"
        for what, ranks in doing.items()
    ]


def _is_here(one: WorkerState) -> bool:
    return not one.returned and not one.lost


def _doing(one: WorkerState) -> str:
    if one.returned:
        return ""
    status = one.status
    if status is None:
        return "at work"
    if status.phase == "starting":
        return "starting"
    noticed = one.failure is not None and one.failure.kind == "peer" and status.operation
    if status.phase in WAITING or noticed:  # its error may have ended the phase already
        return f"waiting in {status.operation or status.phase}"
    return f"in {status.operation or status.phase} at step {status.step:,}"


def _be(ranks: Sequence[int], verb: Literal["are", "were"]) -> str:
    return verb if len(ranks) > 1 else {"are": "is", "were": "was"}[verb]


def _workers(ranks: Sequence[int]) -> str:
    """`worker 3`, `workers 0, 2, 3`, `workers 0-15, 17`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return f"{'worker' if len(ranks) == 1 else 'workers'} {', '.join(parts)}"
