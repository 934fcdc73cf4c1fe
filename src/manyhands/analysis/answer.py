"""The answer of a study in a few sentences: what to train with, what it gains, where it stops paying off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.candidates import Candidate, by_speed, by_time, faster, first
from manyhands.analysis.fine_line import FineLine, fine_lines
from manyhands.analysis.regimes import about, regimes
from manyhands.analysis.scaling import Point, curves, points
from manyhands.analysis.target import ToTarget, to_target
from manyhands.core import formatting
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results

ONE = "one worker with one thread"
MOST_TIES = 3  # named in the answer
UNTRIED = "Only speed was measured; whether it learns was not tried."


class Answer(NamedTuple):
    """The answer for one task."""

    task: str
    text: str
    advised: ToTarget | Point | None  # the simplest of those that are not told apart from the fastest
    cheapest: ToTarget | Point | None
    lines: list[str]  # the sentences of the text
    winners: list[ToTarget | Point]  # the fastest, and those that are not told apart from it


class _Field(NamedTuple):
    """The records of one task and the candidates for its answer."""

    task: str
    records: list[RunRecord]
    tries: list[ToTarget]
    candidates: list[Candidate]  # the fastest first
    results: Results

    @property
    def cores(self) -> int:
        return max(record.environment.cores for record in self.records)

    @property
    def every(self) -> str:
        return f"one worker with all {self.cores} cores as threads"

    @property
    def winners(self) -> list[Candidate]:
        """The candidates that are not told apart from the fastest one, which is the first."""
        fastest = self.candidates[0]
        return [each for each in self.candidates if each is fastest or faster(fastest, each).low <= 1]

    @property
    def best(self) -> Candidate:
        """The simplest winner: with the fewest workers, synchronous, then the fastest."""

        def simplicity(each: Candidate) -> tuple[int, bool]:
            return each.cell.workers, groups.traits_of(each.cell.variant).asynchronous

        return min(self.winners, key=simplicity)

    @property
    def several(self) -> list[Candidate]:
        return [each for each in self.candidates if each.cell.workers > 1]


def answers(results: Results) -> list[Answer]:
    """Return one answer per task, in order of appearance."""
    return [_answer(results, task) for task in groups.tasks(results.records)]


def _answer(results: Results, task: str) -> Answer:
    records = groups.of_task(results.records, task)
    tries = _one_target(to_target(records, results.price))
    timed, untimed = by_time(tries), []
    if not timed:
        untimed = by_speed(_converged(points(records, task, results.price), records), records[0].unit)
    field = _Field(task, records, tries, timed or untimed, results)
    lines = _lines(field, bool(timed))
    cheapest = min(field.candidates, key=lambda each: each.spent, default=None)
    return Answer(
        task,
        " ".join(lines),
        field.best.cell if field.candidates else None,
        cheapest.cell if cheapest else None,
        lines,
        [each.cell for each in field.winners] if field.candidates else [],
    )


def _converged(cells: Sequence[Point], records: Sequence[RunRecord]) -> list[Point]:
    """The cells none of whose runs diverged: a fast setup that does not train is not advised."""
    diverged = {record.run for record in records if record.status == "diverged"}
    return [cell for cell in cells if diverged.isdisjoint(cell.runs)]


def _one_target(tries: Sequence[ToTarget]) -> list[ToTarget]:
    """The cells with the most common target: seconds to different targets cannot be compared."""
    targets = [each.target for each in tries]
    chosen = max(targets, key=lambda target: (targets.count(target), target), default=None)
    return [each for each in tries if each.target == chosen]


def _lines(field: _Field, reached: bool) -> list[str]:
    if not field.candidates:
        return [line for line in (_no_candidates(field), _batches(field)) if line]
    missed = [] if reached or not field.tries else [_not_reached(field)]
    lines = [
        *missed,
        _main(field, reached, bool(missed)),
        _ties(field),
        "" if reached or missed else UNTRIED,
        _threads(field),
        _line(field),
        _batches(field),
        _cheapest(field),
        _late(field) if reached else "",
        _noise(field),
    ]
    return [line for line in lines if line]


def _no_candidates(field: _Field) -> str:
    arrived = [each for each in field.tries if each.samples]
    if not field.tries:
        return f"for {field.task} no run came to its end: there is no answer yet."
    if not arrived:
        return _not_reached(field)
    best = min(arrived, key=lambda each: each.samples.median if each.samples else 0.0)
    goal = formatting.threshold(best.target, best.metric_name)
    assert best.samples is not None
    count = formatting.count(best.samples.median, field.records[0].unit)
    text = f"for {field.task} nothing was timed, so there is no fastest; the fewest samples to {goal} took"
    return f"{text} {best.variant}, {best.workers_text}, batch {best.batch}: {count}."


def _not_reached(field: _Field) -> str:
    """Say that no cell reached the target, and how close the best one came."""
    goal = formatting.threshold(field.tries[0].target, field.tries[0].metric_name)
    ended = [each for each in field.records if each.best_metric is not None and groups.attempted(each)]
    some = sum(each.reached for each in field.tries)
    if some:
        return f"for {field.task} no cell reached {goal} in most of its runs ({some} did)."
    if not ended:
        return f"for {field.task} no cell reached {goal}."
    name = ended[0].metric_name
    sign = 1 if groups.higher_is_better(ended[0]) else -1
    best = min(ended, key=lambda each: (-sign * (each.best_metric or 0.0), groups.title(each)))
    near = formatting.score(best.best_metric, name)
    return f"for {field.task} no cell reached {goal}; {groups.title(best)} came nearest with {near}."


def _main(field: _Field, reached: bool, again: bool) -> str:
    best, one = field.best, first(field.candidates, 1)
    start = _start(field, reached, again)
    if len(field.candidates) == 1:
        only = f"{'by speed ' if again else f'for {field.task} '}there is only one cell, {best.name}"
        return f"{_capital(only) if again else only}: {best.shown}; it has nothing to be compared with."
    if one is None:
        return f"{start} {best.name}: {best.shown}. No run had {ONE}, so there is no speed-up to tell."
    if best is one:
        others = [each for each in field.candidates if each not in field.winners]
        if not others:
            return f"{start} {best.name}: {best.shown}. Nothing is faster beyond the noise."
        longer = takes(others[0].pace.median / best.pace.median)
        return f"{start} {best.name}: {best.shown}. Nothing else pays: {others[0].name} {longer}."
    gained = faster(best, one)
    against = f"({best.shown} against {one.brief})"
    if gained.low <= 1:
        return f"{start} {best.name}, which is not told apart from {ONE} {against}."
    between = f"{times(gained.median)} ({times(gained.low)} to {times(gained.high)})"
    return f"{start} {best.name}: {between} faster than {ONE} {against}."


def _ties(field: _Field) -> str:
    """The other winners: with these measurements nobody can say which is faster."""
    others = [each for each in field.winners if each is not field.best]
    if not others:
        return ""
    names = [f"{each.name} ({each.brief})" for each in others[:MOST_TIES]]
    left = len(others) - len(names)
    text = "; ".join([*names, f"and {left} more"] if left else names)
    return f"Not told apart from it: {text}."


def _start(field: _Field, reached: bool, again: bool) -> str:
    hosts = {host for record in field.records for host in record.hosts}
    here = "on this machine" if len(hosts) <= 1 else f"on these {len(hosts)} machines"
    if reached:
        return f"for {field.task} {here} train with"
    fastest = "among the fastest is" if len(field.winners) > 1 else "the fastest is"
    return f"By speed alone, {here} {fastest}" if again else f"for {field.task} {here} {fastest}"


def _threads(field: _Field) -> str:
    """Compare with one worker that uses all cores as threads: what a user would run without manyhands."""
    best, every = field.best, first(field.candidates, field.cores)
    if field.cores == 1 or not field.several:
        return ""
    if every is None:
        return f"{_capital(field.every)} was not run."
    if best is every:
        other = field.several[0]
        if other in field.winners:
            return ""
        longer = takes(other.pace.median / best.pace.median)
        return f"Plain threads win: the best of several workers, {other.name}, {longer}."
    if best.cell.workers == 1:
        return ""
    gained = faster(best, every)
    if gained.low <= 1:
        return f"Plain threads are not told apart from it: {field.every} ({every.brief})."
    return f"It is {times(gained.median)} faster than plain threads, {field.every} ({every.brief})."


def _line(field: _Field) -> str:
    """The fine line of the recommended strategy."""
    best = field.best.cell
    lines = [line for line in fine_lines(curves(field.records)) if _through(line, best)]
    if best.workers == 1 or not lines:
        return ""
    # a fine line below the recommended workers would contradict the answer, which is by time to the target
    # a fine line at a winner would say that it is slower, where time to the target does not tell them apart
    tied = {each.cell.workers for each in field.winners if each.cell.variant == best.variant}
    agreeing = [
        line
        for line in lines
        if line.slower_from is None or (line.slower_from > best.workers and line.slower_from not in tied)
    ]
    crossed = [line for line in agreeing if line.slower_from or line.costlier_from]
    return next((line.sentence for line in [*crossed, *agreeing]), "")


def _through(line: FineLine, cell: ToTarget | Point) -> bool:
    if line.variant != cell.variant or cell.workers not in line.counts:
        return False
    return line.fixed == (cell.batch if line.kind == "strong" else cell.batch / cell.workers)


def _batches(field: _Field) -> str:
    """Up to which batch larger batches save steps."""
    fit = next((fit for fit in regimes(field.records) if fit.perfect_until is not None), None)
    if fit is None or fit.perfect_until is None:
        return ""
    inside = fit.points[0].batch <= fit.perfect_until.value <= fit.points[-1].batch
    if not inside:
        return fit.sentence.partition(". ")[0] + "."
    return f"Beyond batch {about(fit.perfect_until)} doubling the batch no longer halves the steps."


def _cheapest(field: _Field) -> str:
    best, least = field.best, min(field.candidates, key=lambda each: each.spent)
    if len(field.candidates) == 1:
        return ""
    if least is best:
        return "It is the cheapest, too." if field.results.price is not None else ""
    times_as_fast = faster(least, best)
    if best.spent / least.spent * times_as_fast.low / times_as_fast.median <= 1:
        return ""  # the costs are not told apart
    if field.results.price is None or least.cell.money is None or best.cell.money is None:
        text = f"Fewest worker-seconds are spent by {least.name}:"
        return f"{text} {_three(least.spent)} against {_three(best.spent)}{_unit(field)}."
    price, other = (f"{field.results.currency}{cell.money:.2g}" for cell in (least.cell, best.cell))
    return f"Cheapest is {least.name}: {price} against {other}{_unit(field)}."


def _three(value: float) -> str:
    """The value with three digits: `0.0123`, `13.3`, `1,110`."""
    return f"{float(f'{value:.3g}'):,.10g}"


def _unit(field: _Field) -> str:
    if isinstance(field.best.cell, Point):
        return f" for a million {field.records[0].unit}"
    return f" to {formatting.threshold(field.tries[0].target, field.tries[0].metric_name)}"


def _late(field: _Field) -> str:
    late = sum(each.best_seconds is None for each in field.tries)
    goal = formatting.threshold(field.tries[0].target, field.tries[0].metric_name)
    return f"{late} of {len(field.tries)} cells did not reach {goal}." if late else ""


def _noise(field: _Field) -> str:
    noisy = field.best.cell.noisy
    return (
        "The machine was noisy while this was measured: run it again before relying on it." if noisy else ""
    )


def times(ratio: float) -> str:
    """`1.9x`; with two decimals below 1.1, so that a small gain does not become `1.0x`."""
    return f"{ratio:.1f}x" if ratio >= 1.095 else f"{ratio:.2f}x"


def takes(ratio: float) -> str:
    """`takes 20 % longer`, or from a ratio of 2 on `takes 2.0x as long`."""
    return f"takes {formatting.percent(ratio - 1)} longer" if ratio < 2 else f"takes {ratio:.1f}x as long"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
