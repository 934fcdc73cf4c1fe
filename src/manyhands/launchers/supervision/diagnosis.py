"""The diagnosis: from the states of all workers to one message that says which failed, where and in what.

Pure functions over what others have collected: nothing here reads the clock, a process or a file.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from manyhands.core.formatting import duration
from manyhands.core.rank_info import RankStatus
from manyhands.core.tracebacks import LOG_NOTE, headline
from manyhands.launchers.control.remote_calls import Failure
from manyhands.launchers.worker_state import ProcessExit, WorkerState

WAITING = ("communication", "wait")  # phases in which a worker makes no progress because another one does not
TRACE_LINES = 8  # of a traceback that is in a log
UNLOGGED_TRACE_LINES = 40  # of one that is nowhere else
STACK_LINES = 6
_SIGNALS = {
    "SIGKILL": "often because memory ran out",
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "often because shared memory is full",
    "SIGILL": "an instruction that this processor does not support",
    "SIGABRT": "native code called abort",
    "SIGFPE": "an arithmetic error in native code",
}
SIGNALS = {
    getattr(signal, name): meaning for name, meaning in _SIGNALS.items() if hasattr(signal, name)
}  # Windows has some of them


def first_cause(workers: Iterable[WorkerState]) -> WorkerState:
    """Of several workers that failed at nearly the same time, the one that caused the others to fail."""
    bad = [one for one in workers if one.failed_at is not None]
    first = min(bad, key=lambda one: (is_consequence(one), one.failed_at, one.rank))
    if is_ours(first):  # all of them may raise it: the lowest rank is taken
        return min((one for one in bad if is_ours(one)), key=lambda one: one.rank)
    return first


def is_consequence(one: WorkerState) -> bool:
    """Whether its error only reports that another worker failed."""
    return one.exit is None and one.failure is not None and one.failure.kind == "peer"


def is_ours(one: WorkerState) -> bool:
    """Whether it raised a ManyhandsError, which ends a group unchanged."""
    return one.exit is None and one.failure is not None and one.failure.kind == "ours"


def failed(culprit: WorkerState, everyone: Sequence[WorkerState], seconds: float) -> str:
    """The message about a worker that raised or died; the others were stopped this many seconds later."""
    return "\n".join(_failed(culprit, len(everyone)) + _others({culprit.rank}, everyone, seconds))


def _failed(one: WorkerState, size: int) -> list[str]:
    """What happened; if a line of the user's code led to it, that line comes first."""
    failure = one.failure if one.exit is None else None
    if failure is None or not failure.user_line or failure.kind == "exit":
        return [f"{name(one, size)} {_what_happened(one)}{_at(one.status)}", *_output_of(one)]
    return [
        headline(failure.user_line, failure.name, failure.text),
        f"{name(one, size)} {_raised_this(failure)}{_at(one.status)}",
        *([f"{LOG_NOTE}{one.log}"] if one.log else _output_of(one)),
    ]


HangReason = Literal["silent", "busy", "astray", "behind", "deadlock"]


class Blame(NamedTuple):
    """The workers that keep a group from making progress; none if all of them wait for each other."""

    ranks: tuple[int, ...]
    reason: HangReason


class Loss(NamedTuple):
    """What is said about a lost worker when the others continue."""

    sentence: str
    details: list[str]  # the end of its traceback or stack, or where its output is


def loss(
    one: WorkerState,
    size: int,
    reason: HangReason | None = None,
    replacement: tuple[int, int] | None = None,
) -> Loss:
    """About a worker that raised, died or (for this reason) hung; its replacement's number, and the limit."""
    then = "the others continue"
    if replacement is not None:
        then = "a new worker replaces it (replacement {} of {})".format(*replacement)
    happened = _what_happened(one) if reason is None else _hangs(one, reason)
    about = f"{name(one, size)} {happened}{_at(one.status)}"
    if reason is None:
        return Loss(f"{about}; {then}", _output_of(one))
    return Loss(f"{about}; it was killed, and {then}", _stack(one, "its stack (innermost frame last):"))


def blame(everyone: Iterable[WorkerState]) -> Blame:
    """Of a group that hangs: the workers that do not respond, or do not wait, or are the furthest behind.

    Only workers that send a status can be judged. A worker that has returned keeps no other waiting.
    """
    left = [one for one in everyone if _is_present(one) and one.status is not None]
    longest = max((one.stalled_for for one in left), default=0.0)
    stuck = [
        one for one in left if one.stalled_for >= longest / 2
    ]  # the others do not wait for one that moved
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
    return Blame((), "deadlock")


def hung(found: Blame, everyone: Sequence[WorkerState], seconds: float) -> str:
    """The message about a group that hangs; the workers were stopped this many seconds later."""
    left = [one for one in everyone if _is_present(one)]
    if not found.ranks:
        stalled = duration(min(one.stalled_for for one in left))
        groups = _groups(left, "are")
        if len(groups) == 1 and len(left) == len(everyone):
            doing = groups[0].partition(" are ")[2] or groups[0].partition(" is ")[2]
            lines = [f"all workers are {doing}; none has made progress for {stalled}"]
        else:
            lines = [f"{'; '.join(groups)}; none has made progress for {stalled}"]
        lines += _stack(left[0], "stack of worker {rank} (innermost frame last):")
        ranks = [one.rank for one in left]
        return "\n".join(lines + _others(set(ranks), everyone, seconds, ranks))
    culprit = next(one for one in everyone if one.rank == found.ranks[0])
    lines = [f"{name(culprit, len(everyone))} {_hangs(culprit, found.reason)}{_at(culprit.status)}"]
    lines += _stack(culprit, "its stack (innermost frame last):")
    return "\n".join(lines + _others({culprit.rank}, everyone, seconds))


def missing(absent: Sequence[int], size: int, seconds: float, hint: str = "") -> str:
    """The message about workers that never connected."""
    return f"{_workers(absent)} of {size} did not start within {duration(seconds)}{hint}"


def name(one: WorkerState, size: int) -> str:
    """`worker 1 of 4 (host gpu-2, pid 4242)`."""
    about = [f"host {one.host}"] if one.host else []
    about += [f"pid {one.pid}"] if one.pid else []
    return f"worker {one.rank} of {size}" + (f" ({', '.join(about)})" if about else "")


def exited(how: ProcessExit) -> str:
    """`was killed by signal 9 (SIGKILL, often because memory ran out)`."""
    if how.kind == "lost":
        return "was lost (its connection closed: killed, crashed or exited)"
    if how.kind == "exit":
        return f"exited with code {how.number}"
    try:
        number = signal.Signals(how.number)
    except ValueError:
        return f"was killed by signal {how.number}"
    hint = SIGNALS.get(number)
    return f"was killed by signal {how.number} ({number.name}{', ' + hint if hint else ''})"


def raised(failure: Failure) -> str:
    """`raised ValueError: bad thing`."""
    if failure.kind == "exit":
        return exited(ProcessExit("exit", failure.code))
    first = failure.text.strip().partition("\n")[0]
    what = f"raised {failure.name}: {first}" if first else f"raised {failure.name}"
    return f"{what} (out of memory)" if _is_memory(failure) and "out of memory" not in first.lower() else what


def _raised_this(failure: Failure) -> str:
    return "raised this error (out of memory)" if _is_memory(failure) else "raised this error"


def _is_memory(failure: Failure) -> bool:
    text = failure.text.lower()
    return "can't allocate memory" in text or "out of memory" in text or failure.name == "MemoryError"


def _what_happened(one: WorkerState) -> str:
    if one.exit is not None:
        return exited(one.exit) + ("" if one.connected else " before it started")
    assert one.failure is not None
    return raised(one.failure)


def _hangs(one: WorkerState, reason: HangReason) -> str:
    if reason != "silent":
        return f"has been hanging for {duration(one.stalled_for)}"
    since = duration(max(one.silent_for, one.stalled_for))
    return f"has {'been stopped (SIGSTOP)' if one.stopped else 'not responded'} for {since}"


def _at(status: RankStatus | None) -> str:
    """`at step 1,204, in backward`, as far as it is known."""
    if status is None:
        return ""
    if status.phase == "starting":
        return " while it was starting"
    return f" at step {status.step:,}, in {status.operation or status.phase}"


def _output_of(one: WorkerState) -> list[str]:
    """The end of its traceback, or where its output is."""
    failure = one.failure if one.exit is None else None
    if failure is not None and failure.kind != "exit":
        return _trace(failure, one.log)
    return [f"its output is in {one.log}"] if one.log is not None and one.has_output else []


def _trace(failure: Failure, log: Path | None) -> list[str]:
    lines = failure.trace.rstrip().splitlines()
    shown = lines[-(TRACE_LINES if log else UNLOGGED_TRACE_LINES) :]
    return [f"  {line}" for line in shown] + ([f"{LOG_NOTE}{log}"] if log else [])


def _stack(one: WorkerState, heading: str) -> list[str]:
    if one.position is None or not one.position.stack:
        return []
    lines = one.position.stack.rstrip().splitlines()[-STACK_LINES:]
    return [heading.format(rank=one.rank)] + [f"  {line}" for line in lines]


def _others(
    named: set[int], everyone: Sequence[WorkerState], seconds: float, also_stopped: Sequence[int] = ()
) -> list[str]:
    """What the other workers were doing, in groups, and when they were stopped."""
    rest = [one for one in everyone if one.rank not in named and not one.lost]
    groups = _groups([one for one in rest if one.returned or one.status is not None], "were")
    if stopped := [*also_stopped, *(one.rank for one in rest if not one.returned)]:
        mentioned = [one.rank for one in rest if not one.returned and one.status is not None]
        who = f"{_workers(stopped)} {_be(stopped, 'were')}"
        if mentioned == stopped:
            who = "they were" if len(stopped) > 1 else "it was"
        groups.append(f"{who} stopped after {duration(seconds)}")
    if lost := [one.rank for one in everyone if one.lost]:
        groups.append(f"{_workers(lost)} {_be(lost, 'were')} lost before")
    return ["; ".join(groups)] if groups else []


def _groups(some: Iterable[WorkerState], verb: Literal["are", "were"]) -> list[str]:
    """`workers 0, 2 were in forward at step 12`, one for each activity."""
    doing: dict[str, list[int]] = {}
    for one in some:
        doing.setdefault(_doing(one), []).append(one.rank)
    return [
        f"{_workers(ranks)} had returned" if what == "" else f"{_workers(ranks)} {_be(ranks, verb)} {what}"
        for what, ranks in doing.items()
    ]


def _is_present(one: WorkerState) -> bool:
    return not one.returned and not one.lost


def _doing(one: WorkerState) -> str:
    if one.returned:
        return ""
    status = one.status
    if status is None:
        return "running"
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
