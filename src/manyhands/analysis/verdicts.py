"""Verdicts in sentences: those of one run, the largest loss first, and those of a whole study."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.analysis import causes, groups, remarks
from manyhands.analysis.causes import Facts as Facts
from manyhands.analysis.causes import Rule
from manyhands.analysis.causes import Verdict as Verdict
from manyhands.analysis.fine_line import FineLine, fine_lines
from manyhands.analysis.scaling import Baseline, baselines, curves, points
from manyhands.analysis.target import to_target
from manyhands.core import formatting
from manyhands.core.statistics import NOISY, apart
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results

RULES: list[tuple[str, Rule]] = [*causes.RULES, *remarks.RULES]

# A few words for a table. How a run ended comes first, then causes that outweigh all others.
_FIRST = {
    "diverged": "diverged",
    "interrupted": "interrupted",
    "lost": "lost workers",
    "oversubscribed": "more workers than cores",
}
_CAUSES = {
    "communication": "communication",
    "stragglers": "waits for the slowest",
    "bubble": "stages wait",
    "data": "waits for data",
    "small-batch": "small batch per worker",
    "contention": "shared memory bandwidth",
    "optimizer": "optimizer",
    "overhead": "short steps",
}
_THEN = {
    "slower-than-one": "slower than one worker",
    "threads-win": "threads are faster",
    "near-the-limit": "near the limit",
    "memory": "memory nearly full",
    "staleness": "stale",
    "noisy": "noisy machine",
    "unmeasured": "no steady speed",
}


def verdicts(
    record: RunRecord, baseline: Baseline | None, threads_baseline: Baseline | None = None
) -> list[Verdict]:
    """Return all verdicts that apply to a run, the largest loss first."""
    facts = causes.facts(record, baseline, threads_baseline)
    found = [verdict for _, rule in RULES if (verdict := rule(facts)) is not None]
    return sorted(found, key=lambda verdict: -verdict.lost)


def word(verdicts: Sequence[Verdict]) -> str:
    """A few words for a table: `near the limit`, `more workers than cores`."""
    rules = [verdict.rule for verdict in verdicts]
    for known in (_FIRST, _CAUSES, _THEN):
        # causes are ordered by what they cost, the others as in their table
        order = rules if known is _CAUSES else list(known)
        for rule in order:
            if rule in rules and rule in known:
                return known[rule]
    return ""


def study_verdicts(results: Results) -> list[Verdict]:
    """Return the verdicts on a study: largest loss, faster threads, fine lines, noise, missing cells."""
    records = results.records
    found = [
        *_largest(records),
        *(verdict for task in groups.tasks(records) for verdict in _of_task(records, task)),
        *_lines(fine_lines(curves(records))),
        *_not_reached(records),
        *_trust(results),
        *_missing(results),
    ]
    return sorted(found, key=lambda verdict: -verdict.lost)


def _largest(records: Sequence[RunRecord]) -> list[Verdict]:
    """The verdict on the run that lost most; the first one of several equal losses."""
    best: tuple[Verdict, RunRecord] | None = None
    for record in records:
        if record.spec.workers < 2:
            continue
        for verdict in verdicts(record, None):
            if best is None or verdict.lost > best[0].lost:
                best = verdict, record
    if best is None or best[0].lost == 0:
        return []
    verdict, record = best
    where = f"{groups.task_name(record)}, {groups.title(record)}"
    return [Verdict(verdict.rule, f"Most is lost by {where}: {verdict.text}", verdict.lost)]


def _of_task(records: Sequence[RunRecord], task: str) -> list[Verdict]:
    """Verdicts on a task: plain threads are faster than all workers, or no baseline was run."""
    several = [point for point in points(records, task) if point.workers > 1]
    if not several:
        return []
    one, every = baselines(records, task, None)
    found = []
    if one is None:
        text = f"For {task} no run had one worker and one thread: its speed-ups have no baseline."
        found.append(Verdict("no-baseline", text, 0.0))
    best = max(several, key=lambda point: point.throughput.median)
    if every is not None and every.throughput.median > best.throughput.median:
        ahead = every.throughput.median / best.throughput.median
        sure = "" if apart(every.throughput, best.throughput) else ", within the noise"
        text = f"For {task} plain threads win in throughput: {every.spoken} is {ahead:.2f}x as fast as"
        text += (
            f" the best of several workers ({best.variant}, {best.workers_text}, batch {best.batch}){sure}."
        )
        found.append(Verdict("threads-win", text, 0.0))
    return found


def _lines(lines: Sequence[FineLine]) -> list[Verdict]:
    """One verdict per strategy, at its first batch: other batches give similar results."""
    strategies: dict[tuple[str, str], list[FineLine]] = {}
    for line in lines:
        if line.slower_from is not None:
            strategies.setdefault((line.task, line.variant), []).append(line)
    found = []
    for (task, variant), group in strategies.items():
        others = len(group) - 1
        more = f" (and at {formatting.plural(others, 'other batch', 'other batches')})" if others else ""
        text = f"{task}, {variant}, {group[0].batch}{more}: {group[0].sentence}"
        found.append(Verdict("fine-line", text, 0.0))
    return found


def _not_reached(records: Sequence[RunRecord]) -> list[Verdict]:
    found = []
    arrivals = to_target(records)
    for task in groups.tasks(records):
        mine = [each for each in arrivals if each.task == task]
        late = [each for each in mine if each.reached == 0]
        if late:
            goal = formatting.threshold(late[0].target, late[0].metric_name)
            cells = "no cell" if len(late) == len(mine) else f"{len(late)} of {len(mine)} cells never"
            text = f"For {task} {cells} reached {goal}: they count as slower than the time they ran."
            found.append(Verdict("not-reached", text, 0.0))
    return found


def _trust(results: Results) -> list[Verdict]:
    found = []
    noisy = [record for record in results.records if record.timed and (record.machine_noise or 0.0) > NOISY]
    if noisy:
        text = (
            f"{len(noisy)} of {len(results.records)} runs {_was(len(noisy))} measured while the machine was"
        )
        found.append(
            Verdict("noisy", f"{text} more than {formatting.percent(NOISY)} slower than at its best.", 0.0)
        )
    if again := len(results.repeated):
        text = f"{formatting.plural(again, 'run')} measured under heavy noise {_was(again)} repeated."
        found.append(Verdict("repeated", text, 0.0))
    diverged = [record for record in results.records if record.status == "diverged"]
    if diverged:
        runs, where = formatting.plural(len(diverged), "run"), groups.title(diverged[0])
        first = where if len(diverged) == 1 else f"the first: {where}"
        found.append(Verdict("diverged", f"{runs} diverged, {first}.", 0.0))
    return found


def _was(count: int) -> str:
    return "was" if count == 1 else "were"


def _missing(results: Results) -> list[Verdict]:
    """Cells without a record, and why the first of them has none."""
    found = []
    for rule, cells, one, many in (
        ("failed", results.failed, "failed", "failed"),
        ("excluded", results.excluded, "cannot work and was not run", "cannot work and were not run"),
        ("left", results.left, "has not been run", "have not been run"),
    ):
        if len(cells) == 1:
            found.append(Verdict(rule, f"1 cell {one}: {cells[0].reason}.", 0.0))
        elif cells:
            text = f"{len(cells)} cells {many}, the first because: {cells[0].reason}."
            found.append(Verdict(rule, text, 0.0))
    return found
