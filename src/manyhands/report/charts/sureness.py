"""What an interval is from, and who is not told apart from the fastest, in the same words in all charts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from manyhands.analysis.scaling import Point
from manyhands.analysis.target import ToTarget
from manyhands.core import formatting
from manyhands.core.statistics import Summary

TIED = "●"  # the mark of the winners
TIED_NOTE = f"{TIED} the fastest, and what is not told apart from it"
ONE_NOTE = f"{TIED} the fastest"
MOST_NAMED = 3


def basis(n: int) -> str:
    """What an interval of n values is from: `3 runs`."""
    return "1 run" if n == 1 else f"{n} runs"


def interval(found: Summary, show: Callable[[float], str]) -> str:
    """`7.0 s to 8.9 s, from 3 runs`; of one run, the interval is what is usual on a machine."""
    ends = f"{show(found.low)} to {show(found.high)}"
    if found.n == 1:
        return f"{ends}, from 1 run and the usual noise of a machine"
    return f"{ends}, from {basis(found.n)}"


def intervals_note(found: Iterable[Summary], mark: str = "Thin lines") -> str:
    """What the intervals of a chart are from: `Thin lines: 95 % intervals from 2 to 6 runs.`"""
    counts = sorted({each.n for each in found if each.high > each.low})
    if not counts:
        return ""
    if counts[-1] == 1:
        return f"{mark}: how far 1 run is to be trusted, from the usual noise of a machine."
    several = [n for n in counts if n > 1]
    some = basis(several[0]) if len(several) == 1 else f"{several[0]} to {several[-1]} runs"
    alone = "; where there is 1 run, from the usual noise of a machine" if counts[0] == 1 else ""
    return f"{mark}: 95 % intervals from {some}{alone}."


def cell_key(cell: ToTarget | Point) -> tuple[str, int, int, int]:
    """What tells the cells of a task apart."""
    return cell.variant, cell.workers, cell.threads, cell.batch


def listed(names: Sequence[str]) -> str:
    """`a, b and c`; the last ones of many are counted."""
    if len(names) > MOST_NAMED + 1:
        names = [*names[:MOST_NAMED], f"{len(names) - MOST_NAMED} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def fastest(names: Sequence[str]) -> str:
    """`a is the fastest`, or `a, b and c are the fastest and not told apart`."""
    if len(names) == 1:
        return f"{names[0]} is the fastest"
    return f"{listed(names)} are the fastest, and not told apart"


def about(found: Summary, show: Callable[[float], str] = formatting.duration) -> str:
    """`7.9 s (7.0 s to 8.9 s)`."""
    return f"{show(found.median)} ({show(found.low)} to {show(found.high)})"
