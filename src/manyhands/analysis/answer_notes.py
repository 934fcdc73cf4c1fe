"""What an answer says about its own measurement: what was left out, what is implausible, how sure it is."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.analysis import pairs
from manyhands.analysis.answer_field import Field
from manyhands.analysis.comparisons import implausible_cells
from manyhands.analysis.target import ToTarget
from manyhands.core import formatting
from manyhands.core.statistics import Summary

MOST = 3  # cells that are named in a sentence


def diverged(field: Field) -> str:
    """The cells that are left out because a run diverged."""
    wild = sorted(
        f"{each.variant}, {each.workers_text}, batch {each.batch}" for each in field.tries if each.diverged
    )
    if not wild:
        return ""
    names = wild[:MOST]
    more = [f"and {len(wild) - len(names)} more"] if len(wild) > len(names) else []
    return f"Not advised, because a run diverged: {'; '.join([*names, *more])}."


def untried(field: Field) -> str:
    """The cells that are not compared, because nobody knows what they learn; the fast ones first."""
    if not field.untried:
        return ""
    faster = [each for each in field.untried if field.faster(each, field.best).low > 1]
    shown = faster or field.untried
    names = [f"{each.name} ({each.brief})" for each in shown[:MOST]]
    more = [f"{len(shown) - MOST} more"] if len(shown) > MOST else []
    listed = _and([*names, *more])
    they, make = ("it", "makes") if len(shown) == 1 else ("they", "make")
    other = f"{they} {make} other steps, and whether {they} {'learns' if they == 'it' else 'learn'} as well"
    if faster:
        return f"By speed alone {listed} {'is' if they == 'it' else 'are'} faster, but {other} was not tried."
    return f"Not compared: {listed}, because {other} was not tried."


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{'; '.join(names[:-1])} and {names[-1]}"


def late(field: Field) -> str:
    late = sum(each.samples is None and not each.diverged for each in field.tries)
    goal = formatting.threshold(field.tries[0].target, field.tries[0].metric_name)
    return f"{late} of {len(field.tries)} cells did not reach {goal}." if late else ""


def implausible(field: Field) -> str:
    """The largest of the speed-ups of which not even the lower end is possible."""
    found = implausible_cells(field.results, field.task)
    if not found:
        return ""
    worst = max(found, key=lambda each: each.speed_up.median)
    return f"{worst.point.variant}, {worst.point.workers_text}: {worst.text}"


def measured(field: Field) -> str:
    """How much was measured: `Measured in 5 to 8 paired rounds and 3 seeds; the machine varied by 6 %.`"""
    cells = [each.cell for each in field.candidates]
    paired = {each.cell: each for each in field.points if each.cell}
    rounds = [paired[each.cell].throughput.n for each in cells if each.cell in paired]
    if not rounds:
        once = len(cells) > 1 and all(each.pace.n == 1 for each in field.candidates)
        return "Each cell was run once, so only large differences are told." if once else ""
    seeds = [each.samples.n for each in cells if isinstance(each, ToTarget) and each.samples]
    learned = f" and {_range(seeds)} {'seed' if max(seeds) == 1 else 'seeds'}" if seeds else ""
    text = f"Measured in {_range(rounds)} paired {'round' if max(rounds) == 1 else 'rounds'}{learned}"
    varied = _variation(field)
    return f"{text}; the machine varied by {formatting.percent(varied)}." if varied else f"{text}."


def _variation(field: Field) -> float:
    """How much the baseline's blocks varied over the whole measurement."""
    blocks, known = field.results.blocks, {each.cell for each in field.points}
    return max(
        (pairs.variation(blocks, lane) for lane in pairs.lanes(blocks) if lane.baseline in known), default=0.0
    )


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"


def noise(field: Field) -> str:
    noisy = field.best.cell.noisy
    return (
        "The machine was noisy while this was measured: run it again before relying on it." if noisy else ""
    )


def times(ratio: float) -> str:
    """`1.9x`; with two decimals below 1.1, so that a small gain does not become `1.0x`."""
    return f"{ratio:.1f}x" if ratio >= 1.095 else f"{ratio:.2f}x"


def between(ratio: Summary) -> str:
    """`1.9x (1.8x to 2.0x)`."""
    return f"{times(ratio.median)} ({times(ratio.low)} to {times(ratio.high)})"


def takes(ratio: float) -> str:
    """`takes 20 % longer`, or from a ratio of 2 on `takes 2.0x as long`."""
    return f"takes {formatting.percent(ratio - 1)} longer" if ratio < 2 else f"takes {ratio:.1f}x as long"
