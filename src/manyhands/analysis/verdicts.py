"""Verdicts in sentences: those of one run, the largest loss first, and those of a whole study."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.analysis import causes, comparisons, groups, remarks
from manyhands.analysis.comparisons import implausible_cells
from manyhands.analysis.facts import Context, Facts, Rule
from manyhands.analysis.facts import Verdict as Verdict
from manyhands.analysis.fine_line import FineLine, fine_lines
from manyhands.analysis.groups import Key
from manyhands.analysis.regimes import regimes
from manyhands.analysis.scaling import Baseline, Pair, Point, baselines, curves, points
from manyhands.analysis.target import to_target
from manyhands.core import formatting
from manyhands.core.statistics import NOISY, Estimate, ratio
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results

RULES: list[tuple[str, Rule]] = [*causes.RULES, *comparisons.RULES, *remarks.RULES]

# A few words for a table. First how a run ended and whether its speed can be believed, then the cause that
# costs the most, then how it compares.
_FIRST = {
    "diverged": "diverged",
    "interrupted": "interrupted",
    "lost": "lost workers",
    "implausible": "implausible speed-up",
    "unmeasured": "too few steps",
}
_CAUSES = {
    "communication": "communication",
    "stragglers": "waits for the slowest",
    "bubble": "stages wait",
    "data": "waits for data",
    "small-batch": "small batch per worker",
    "contention": "slow beside others",
    "oversubscribed": "more threads than cores",
    "optimizer": "optimizer",
    "overhead": "short steps",
}
_THEN = {
    "slower-than-one": "slower than one worker",
    "threads-win": "threads are faster",
    "oversubscribed": "more threads than cores",
    "like-one": "not told apart from one worker",
    "near-the-limit": "near the limit",
    "below-the-limit": "below the limit",
    "unclear": "speed-up unclear",
    "like-threads": "not told apart from threads",
    "memory": "memory nearly full",
    "staleness": "stale updates",
    "noisy": "noisy machine",
}
WORDS = {**_FIRST, **_CAUSES, **_THEN}
_SLOWER = ("slower-than-one", "threads-win")  # than others, by throughput


def verdicts(
    record: RunRecord,
    baseline: Baseline | None,
    threads_baseline: Baseline | None = None,
    *,
    point: Point | None = None,
    critical_batch: Estimate | None = None,
) -> list[Verdict]:
    """Return all verdicts that apply to a run, the largest loss first.

    `point` is its cell over all repeats: where it is known, its intervals are used, and not those of one run.
    """
    facts = Facts(record, Context(baseline, threads_baseline, point, critical_batch))
    found = [verdict for _, rule in RULES if (verdict := rule(facts)) is not None]
    return sorted(found, key=lambda verdict: -verdict.lost)


def word(verdicts: Sequence[Verdict], *, won: bool = False) -> str:
    """A few words for a table: `near the limit`, `more threads than cores`.

    Of a cell that has won, by its time to the target, none that call it slower by its throughput.
    """
    rules = {verdict.rule for verdict in verdicts if not (won and verdict.rule in _SLOWER)}
    costly = [verdict.rule for verdict in verdicts if verdict.rule in _CAUSES and verdict.lost > 0]
    for order in (_FIRST, costly, _THEN):
        for rule in order:
            if rule in rules:
                return WORDS[rule]
    return ""


def study_verdicts(results: Results) -> list[Verdict]:
    """Return the verdicts on a study: implausible speeds first, then the largest loss, then the others."""
    records = results.records
    found = [
        *_largest(results),
        *(verdict for task in groups.tasks(records) for verdict in _of_task(results, task)),
        *_lines(fine_lines(curves(records, blocks=results.blocks))),
        *_not_reached(records),
        *_trust(results),
        *_missing(results),
    ]
    return sorted(found, key=lambda verdict: (verdict.rule != "implausible", -verdict.lost))


def of_runs(results: Results) -> list[list[Verdict]]:
    """The verdicts on each run of a study, in their order; its speed is judged by that of its cell."""
    records, blocks = results.records, results.blocks
    critical = {task: critical_batch(records, task) for task in groups.tasks(records)}
    cells = {
        (task, Key(point.variant, point.workers, point.threads, point.batch)): point
        for task in critical
        for point in points(records, task, blocks=blocks)
    }
    pairs: dict[tuple[str, int], Pair] = {}
    found = []
    for record in records:
        task, batch = groups.task_name(record), groups.batch(record)
        if (task, batch) not in pairs:
            pairs[task, batch] = baselines(records, task, batch, blocks)
        point = cells.get((task, groups.key(record)))
        found.append(verdicts(record, *pairs[task, batch], point=point, critical_batch=critical[task]))
    return found


def _largest(results: Results) -> list[Verdict]:
    """The verdict on the run that lost most; the first one of several equal losses."""
    best: tuple[Verdict, RunRecord] | None = None
    for record, found in zip(results.records, of_runs(results), strict=True):
        if record.spec.workers < 2:
            continue
        if any(verdict.rule in ("unmeasured", "implausible") for verdict in found):
            continue
        for verdict in found:
            if best is None or verdict.lost > best[0].lost:
                best = verdict, record
    if best is None or best[0].lost == 0:
        return []
    verdict, record = best
    where = f"{groups.task_name(record)}, {groups.title(record)}"
    return [Verdict(verdict.rule, f"The largest loss is that of {where}: {verdict.text}", verdict.lost)]


def critical_batch(records: Sequence[RunRecord], task: str) -> Estimate | None:
    """The critical batch of a task, where learning rates were tuned for it and the records determine it."""
    fits = regimes(groups.of_task(records, task))
    found = [fit.b_crit for fit in fits if fit.tuned and fit.b_crit is not None]
    return found[0] if len(found) == 1 else None


def _of_task(results: Results, task: str) -> list[Verdict]:
    """Verdicts on a task: implausible speeds, threads against workers, no baseline."""
    cells = points(results.records, task, blocks=results.blocks)
    found = [*_implausible(results, task)]
    several = [point for point in cells if point.workers > 1]
    if not several:
        return found
    one, every = baselines(results.records, task, None, results.blocks)
    if one is None:
        text = f"For {task} no run had one worker and one thread: its speed-ups have no baseline."
        found.append(Verdict("no-baseline", text, 0.0))
    best = max(several, key=lambda point: point.throughput.median)
    if every is not None:
        found += _threads(task, every, best)
    return found


def _threads(task: str, every: Baseline, best: Point) -> list[Verdict]:
    """Plain threads against the fastest of several workers: faster, or not told apart."""
    paired = best.against_threads if best.batch == every.batch else None
    share = paired or ratio(best.throughput, every.throughput)
    named = f"{best.variant}, {best.workers_text}, batch {best.batch:,}"
    if share.low > 1:
        return []
    if share.high < 1:
        ahead = f"{every.spoken} is {1 / share.median:.2f}x as fast as the best of several workers ({named})"
        return [Verdict("threads-win", f"For {task} plain threads win in throughput: {ahead}.", 0.0)]
    text = f"For {task} the best of several workers in throughput ({named}) is not told apart from plain"
    speed = comparisons.between(share)
    return [Verdict("like-threads", f"{text} threads: it has {speed} the speed of {every.spoken}.", 0.0)]


def _implausible(results: Results, task: str) -> list[Verdict]:
    """One verdict for all implausible speed-ups of a task, with the largest of them."""
    found = implausible_cells(results, task)
    if not found:
        return []
    point, _, text = max(found, key=lambda each: each.speed_up.median)
    named = f"{point.variant}, {point.workers_text}, batch {point.batch:,}"
    many = f"{len(found)} speed-ups are implausible; the largest is that of " if len(found) > 1 else ""
    return [Verdict("implausible", f"{task}: {many}{named}: {text}", 0.0)]


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
