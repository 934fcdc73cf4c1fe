"""The answer of a study in a few sentences: what to train with, what it gains, where it stops paying off."""

from __future__ import annotations

from typing import NamedTuple

from manyhands.analysis import answer_notes, groups
from manyhands.analysis.answer_field import Field
from manyhands.analysis.answer_notes import MOST, between, takes
from manyhands.analysis.candidates import first
from manyhands.analysis.fine_line import FineLine, fine_lines
from manyhands.analysis.regimes import about, regimes
from manyhands.analysis.scaling import Point, curves
from manyhands.analysis.target import ToTarget
from manyhands.core import formatting
from manyhands.core.statistics import Summary, ratio
from manyhands.records.study_results import Results

ONE = "one worker with one thread"
UNTRIED = "Only speed was measured; whether it learns was not tried."
SAME_STEPS = "Only speed was measured: it makes the steps that one worker makes, and learns the same."


class Answer(NamedTuple):
    """The answer for one task."""

    task: str
    text: str
    # the simplest of the winners; None where nothing reached the target, or nobody knows what it learns
    advised: ToTarget | Point | None
    cheapest: ToTarget | Point | None
    lines: list[str]  # the sentences of the text
    winners: list[ToTarget | Point]  # not told apart from the fastest, which is the first
    groups: list[list[ToTarget | Point]]  # the winners, then those not told apart from the best of the rest
    untried: list[ToTarget | Point]  # not compared: they make other steps, and nobody tried what they learn


def answers(results: Results) -> list[Answer]:
    """Return one answer per task, in order of appearance."""
    return [_answer(Field(task, results)) for task in groups.tasks(results.records)]


def _answer(field: Field) -> Answer:
    lines = _lines(field)
    found = [[each.cell for each in group] for group in field.ranked]
    cheapest = min(field.candidates, key=lambda each: each.spent, default=None)
    return Answer(
        field.task,
        " ".join(lines),
        advised=field.best.cell if field.advisable else None,
        cheapest=cheapest.cell if cheapest else None,
        lines=lines,
        winners=found[0] if found else [],
        groups=found,
        untried=[each.cell for each in field.untried],
    )


def _lines(field: Field) -> list[str]:
    if not field.candidates:
        lines = [_no_candidates(field), answer_notes.diverged(field), _batches(field)]
    else:
        tried = any(not each.diverged for each in field.tries)
        missed = [_not_reached(field)] if tried and not field.reached else []
        lines = [
            *missed,
            _main(field, bool(missed)),
            _ties(field),
            "" if field.reached or missed else SAME_STEPS if field.advisable else UNTRIED,
            answer_notes.untried(field),
            _threads(field),
            _line(field),
            _batches(field),
            _cheapest(field),
            answer_notes.diverged(field),
            answer_notes.late(field) if field.reached else "",
            answer_notes.implausible(field),
            answer_notes.measured(field),
            answer_notes.noise(field),
        ]
    return [line for line in lines if line]


def _no_candidates(field: Field) -> str:
    arrived = [each for each in field.tries if each.samples]
    if not field.tries:
        return f"for {field.task} no run has finished: there is no answer yet."
    if not arrived:
        return _not_reached(field)
    return _by_samples(field, [(each, each.samples) for each in arrived if each.samples])


def _by_samples(field: Field, arrived: list[tuple[ToTarget, Summary]]) -> str:
    """The cell that needed the fewest samples, and those that may need as few."""
    best, needed = min(arrived, key=lambda each: each[1].median)
    goal = formatting.threshold(best.target, best.metric_name)
    unit = field.records[0].unit
    text = (
        f"for {field.task} nothing was timed, so the fastest is not known; the fewest samples to {goal} were "
        f"needed by {best.variant}, {best.workers_text}, batch {best.batch}: "
        f"{formatting.count(needed.median, unit)} ({needed.low:,.0f} to {needed.high:,.0f})."
    )
    others = [each for each, samples in arrived if each is not best and ratio(samples, needed).low <= 1]
    if not others:
        return text
    if {(each.variant, each.workers_text) for each in others} == {(best.variant, best.workers_text)}:
        batches = [f"{each.batch:,}" for each in sorted(others, key=lambda each: each.batch)]
        return f"{text} Not told apart from it: batch {formatting.listed(batches)}."
    names = [f"{each.variant}, {each.workers_text}, batch {each.batch}" for each in others]
    more = f"; and {len(names) - MOST} more" if len(names) > MOST else ""
    return f"{text} Not told apart from it: {'; '.join(names[:MOST])}{more}."


def _not_reached(field: Field) -> str:
    """Say that no cell reached the target, and how close the best one came."""
    goal = formatting.threshold(field.tries[0].target, field.tries[0].metric_name)
    tried = [each for each in field.records if groups.attempted(each) and each.status != "diverged"]
    ended = [each for each in tried if each.best_metric is not None]
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


def _main(field: Field, again: bool) -> str:
    best, one = field.best, first(field.candidates, 1)
    start = _start(field, again)
    if len(field.candidates) == 1:
        return f"{start} {best.name}: {best.shown}. {_nothing_else(field)}"
    if one is None:
        return f"{start} {best.name}: {best.shown}. No run had {ONE}, so the speed-up is not known."
    if best is one:
        others = [each for each in field.candidates if not field.won(each)]
        if not others:
            return f"{start} {best.name}: {best.shown}. Nothing is faster beyond the noise."
        longer = takes(1 / field.faster(others[0], best).median)
        return f"{start} {best.name}: {best.shown}. Nothing else pays: {others[0].name} {longer}."
    gained = field.faster(best, one)
    against = f"({best.shown} against {one.brief})"
    over = ONE if one.cell.batch == best.cell.batch else f"{ONE} at batch {one.cell.batch}"
    if gained.low <= 1:
        return f"{start} {best.name}, which is not told apart from {over} {against}."
    return f"{start} {best.name}: {between(gained)} faster than {over} {against}."


def _nothing_else(field: Field) -> str:
    """Why the only candidate has nothing to be compared with."""
    others = len({groups.key(record) for record in field.records}) - 1
    if not others:
        return "It is the only cell, so there is nothing to compare it with."
    some = "the other cell was" if others == 1 else f"the {others} other cells were"
    why = "timed to the target" if field.reached else "timed without diverging"
    return f"There is nothing to compare it with: {some} not {why}."


def _ties(field: Field) -> str:
    """The other winners: with these measurements nobody can say which is faster."""
    others = [each for each in field.winners if each is not field.best]
    if not others:
        return ""
    shown = others[:MOST]
    more = f", and {len(others) - MOST} more" if len(others) > MOST else ""
    alike = {(each.cell.workers_text, each.cell.batch) for each in shown}
    if alike == {(shown[0].cell.workers_text, field.best.cell.batch)} and len(shown) > 1:
        names = [f"{each.cell.variant} ({each.brief})" for each in shown]
        listed = f"{', '.join(names[:-1])} and {names[-1]} with {shown[0].cell.workers_text}"
        return f"Not told apart from it: {listed}{more}."
    names = [f"{each.name} ({each.brief})" for each in shown]
    return f"Not told apart from it: {'; '.join(names)}{more}."


def _start(field: Field, again: bool) -> str:
    hosts = {host for record in field.records for host in record.hosts}
    here = "on this machine" if len(hosts) <= 1 else f"on these {len(hosts)} machines"
    if field.advisable:
        return f"for {field.task} {here} train with"
    fastest = "among the fastest is" if len(field.winners) > 1 else "the fastest is"
    return (
        f"By speed alone, {here} {fastest}" if again else f"by speed alone, for {field.task} {here} {fastest}"
    )


def _threads(field: Field) -> str:
    """Compare with one worker that uses all cores as threads: what a user would run without manyhands."""
    best, every = field.best, first(field.candidates, field.cores)
    if field.cores == 1 or not field.several:
        return ""
    if every is None:
        ran = any(groups.one_plain_worker(*each[:2]) and each.threads == field.cores for each in field.points)
        return f"{_capital(field.every)} was not {'timed to the target' if ran else 'run'}."
    if best is every:
        other = field.several[0]
        if field.won(other):
            return ""
        longer = takes(1 / field.faster(other, best).median)
        return f"Plain threads win: the best of several workers, {other.name}, {longer}."
    if best.cell.workers == 1:
        return ""
    gained = field.faster(best, every)
    if gained.low <= 1:
        slower = f"slower than {field.winners[0].name}, but not told apart from what is advised"
        return f"{_capital(field.every)} ({every.brief}) is {slower}."
    return f"It is {between(gained)} faster than plain threads, {field.every} ({every.brief})."


def _line(field: Field) -> str:
    """The fine line of the recommended strategy."""
    best = field.best.cell
    lines = [
        line for line in fine_lines(curves(field.records, None, field.results.blocks)) if _through(line, best)
    ]
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


def _batches(field: Field) -> str:
    """Up to which batch larger batches save steps, if the learning rate was tuned at each of them."""
    tuned = [fit for fit in regimes(field.records) if fit.tuned]
    fit = next((fit for fit in tuned if fit.perfect_until is not None), None)
    if fit is None or fit.perfect_until is None:
        return ""
    inside = fit.points[0].batch <= fit.perfect_until.value <= fit.points[-1].batch
    if not inside:
        return fit.sentence.partition(". ")[0] + "."
    return f"Beyond batch {about(fit.perfect_until)} doubling the batch no longer halves the steps."


def _cheapest(field: Field) -> str:
    best, least = field.best, min(field.candidates, key=lambda each: each.spent)
    if len(field.candidates) == 1:
        return ""
    if least is best:
        return "It is the cheapest, too." if field.results.price is not None else ""
    times_as_fast = field.faster(least, best)
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


def _unit(field: Field) -> str:
    if isinstance(field.best.cell, Point):
        return f" for a million {field.records[0].unit}"
    return f" to {formatting.threshold(field.tries[0].target, field.tries[0].metric_name)}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
