"""What an interval is from, and who is not told apart from the fastest, in the same words in all charts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from manyhands.analysis.scaling import Point
from manyhands.analysis.target import ToTarget
from manyhands.core.statistics import Summary

TIED = "●"  # the mark of the winners
TIED_NOTE = f"{TIED} the fastest, and what is not told apart from it"
ONE_NOTE = f"{TIED} the fastest"
UNTRIED = "○"  # the mark of cells that are not compared
UNTRIED_NOTE = f"{UNTRIED} makes other steps than one worker, and whether it learns was not tried"
MOST_NAMED = 3


ONE_RUN = "1 run"  # its interval is the usual noise of a machine


def interval(found: Summary, how: str, show: Callable[[float], str]) -> str:
    """`7.0 s to 8.9 s, from 3 runs`; of one run, the interval is what is usual on a machine."""
    noise = " and the usual noise of a machine" if how == ONE_RUN else ""
    return f"{show(found.low)} to {show(found.high)}, from {how}{noise}"


def intervals_note(hows: Iterable[str], mark: str = "Thin lines") -> str:
    """What the intervals of a chart are from: `Thin lines: 95 % intervals from 5 to 8 paired rounds.`"""
    found = dict.fromkeys(how for how in hows if how)
    several = merged([how for how in found if how != ONE_RUN])
    if not several:
        return f"{mark}: how far 1 run can be trusted, from the usual noise of a machine." if found else ""
    alone = "; where there is 1 run, from the usual noise of a machine" if ONE_RUN in found else ""
    return f"{mark}: 95 % intervals from {' or '.join(several)}{alone}."


def merged(hows: Sequence[str]) -> list[str]:
    """Texts that differ only in their numbers as one: `5 runs` and `8 runs` as `5 to 8 runs`."""
    kinds: dict[str, list[list[int]]] = {}
    for how in hows:
        numbers = [int(number) for number in re.findall(r"\d+", how)]
        template = re.sub(r"(\w)s\b", r"\1", re.sub(r"\d+", "#", how))  # without numbers and plurals
        kinds.setdefault(template, []).append(numbers)
    return [_filled(template, list(zip(*rows, strict=True))) for template, rows in kinds.items()]


def _filled(template: str, columns: Sequence[Sequence[int]]) -> str:
    for numbers in columns:
        low, high = min(numbers), max(numbers)
        count = f"{low}" if low == high else f"{low} to {high}"
        plural = "s" if high > 1 else ""
        template = re.sub(r"# ([\w ]+?)(?=$| x)", rf"{count} \1{plural}", template, count=1)
    return template


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
