"""Rules that compare a run with one worker and with what the cores can give, and say how sure that is."""

from __future__ import annotations

from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.breakdown import STEP_PHASES
from manyhands.analysis.causes import EFFICIENT, of_limit
from manyhands.analysis.facts import Facts, Rule, Verdict, limit_of
from manyhands.analysis.scaling import Baseline, Point, baselines, points
from manyhands.core import formatting, plausible
from manyhands.core.statistics import Summary
from manyhands.records.study_results import Results

NAMED = 0.02  # share of the step: smaller phases are not listed
LOST = ("communication", "wait", "data", "other")  # phases that one worker alone would hardly have
SPOKEN = {"wait": "waiting", "data": "waiting for data", "other": "work of the trainer"}


class Implausible(NamedTuple):
    """A cell whose speed-up is more than its cores can give."""

    point: Point
    speed_up: Summary
    text: str


def implausible(facts: Facts) -> Verdict | None:
    """The whole interval of a speed-up lies beyond what the cores can give.

    Over one thread, if that was run: it says whether this run or the one with all cores as threads is odd.
    """
    speed_up, baseline = facts.speed_up, facts.baseline
    if baseline is None:
        speed_up, baseline = facts.against_threads, facts.threads_baseline
    if baseline is None or speed_up is None or not plausible.implausible(speed_up, facts.limit):
        return None
    text = implausible_text(speed_up, facts.limit, baseline, groups.batch(facts.record))
    return Verdict("implausible", text, 0.0)


def implausible_text(speed_up: Summary, limit: int, baseline: Baseline, batch: int) -> str:
    """What is implausible about a speed-up over a baseline, and where the batches differ, that they do."""
    text = plausible.sentence(speed_up, limit, baseline.spoken)
    if baseline.batch < batch:
        text += f" It had batch {baseline.batch:,}, not {batch:,}, which may be a part of it."
    return text


def implausible_cells(results: Results, task: str) -> list[Implausible]:
    """The cells of a task whose speed-up over one worker, or over all cores as threads, is implausible."""
    records = {record.run: record for record in results.records}
    found = []
    for point in points(results.records, task, blocks=results.blocks):
        limit = limit_of(records[point.runs[0]])
        against = point.against_threads if point.workers > 1 else None  # threads may be slower than one
        pair = baselines(results.records, task, point.batch, results.blocks)
        for speed_up, baseline in zip((point.speed_up, against), pair, strict=True):
            if speed_up and baseline and plausible.implausible(speed_up, limit):
                text = implausible_text(speed_up, limit, baseline, point.batch)
                found.append(Implausible(point, speed_up, text))
    return found


def slower_than_one(facts: Facts) -> Verdict | None:
    """Several workers are slower than one, or not told apart from one."""
    baseline, speed_up = facts.baseline, facts.speed_up
    if baseline is None or speed_up is None or not _several(facts) or speed_up.low > 1:
        return None
    who = groups.workers_text(facts.record)
    if speed_up.high < 1:
        text = f"{who} do {formatting.percent(speed_up.median)} of what {baseline.spoken} does with batch"
        return Verdict("slower-than-one", f"{text} {baseline.batch:,}: they do not pay off here.", 0.0)
    text = f"{who} are not told apart from {baseline.spoken} (batch {baseline.batch:,})"
    return Verdict("like-one", f"{text}: they have {between(speed_up)} its speed.", 0.0)


def threads_win(facts: Facts) -> Verdict | None:
    """One worker with all cores as threads, what a user would run without manyhands, is as fast or faster."""
    baseline, against = facts.threads_baseline, facts.against_threads
    if baseline is None or against is None or not _several(facts) or against.low > 1:
        return None
    if against.high < 1:
        ahead = f"{1 / against.median:.2f}x as fast with batch {baseline.batch:,}"
        return Verdict("threads-win", f"plain threads win: {baseline.spoken} is {ahead}.", 0.0)
    text = f"plain threads are not told apart from it: it has {between(against)} the speed of"
    return Verdict("like-threads", f"{text} {baseline.spoken} (batch {baseline.batch:,}).", 0.0)


def limits(facts: Facts) -> Verdict | None:
    """How near several workers are to what their cores can give."""
    record, baseline = facts.record, facts.baseline
    if not _several(facts) or facts.crowded or implausible(facts):
        return None
    if (beaten := threads_win(facts)) and beaten.rule == "threads-win":
        return None
    lost = sum(facts.share(name) for name in LOST)
    computing = f"{formatting.percent(1 - lost)} of the step is computing"
    near = lost <= 1 - EFFICIENT
    if baseline is None or facts.speed_up is None:
        text = f"{computing}: near the limit of these workers."
        return Verdict("near-the-limit", text, 0.0) if near else None
    done = of_limit(facts.speed_up, facts.limit)
    much = f"{formatting.percent(done.median)} ({100 * done.low:.0f} to {formatting.percent(done.high)})"
    much += f" of {facts.limit}x {baseline.spoken}"
    if near and done.median >= EFFICIENT:
        return Verdict("near-the-limit", f"{computing}, {much}: near the limit of these workers.", 0.0)
    text = f"{groups.workers_text(record)} do {much}"
    if done.high >= 1:
        return Verdict("unclear", f"{text}, which is not told apart from all of it.", 0.0)
    return Verdict("below-the-limit", f"{text}{_where_it_goes(facts)}.", 0.0)


def _several(facts: Facts) -> bool:
    return facts.enough and facts.record.spec.workers > 1


def _where_it_goes(facts: Facts) -> str:
    """The phases beside computing, the largest first."""
    phases = {name: facts.share(name) for name in STEP_PHASES if name not in ("forward", "backward")}
    found = sorted((-share, name) for name, share in phases.items() if share >= NAMED)
    if not found:
        return "; nearly all of the step is computing, which takes longer than one worker's"
    return "; beside computing, a step has " + ", ".join(
        f"{formatting.percent(-share)} {SPOKEN.get(name, name)}" for share, name in found
    )


def between(share: Summary) -> str:
    """`0.97x (0.81x to 1.16x)`."""
    return f"{share.median:.2f}x ({share.low:.2f}x to {share.high:.2f}x)"


RULES: list[tuple[str, Rule]] = [
    ("implausible", implausible),
    ("slower-than-one", slower_than_one),
    ("threads-win", threads_win),
    ("limits", limits),
]
