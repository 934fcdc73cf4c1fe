"""Rules that are not about lost time: how a run ended, how it compares, and how reliable its times are."""

from __future__ import annotations

from collections import Counter

from manyhands.analysis import groups
from manyhands.analysis.causes import EFFICIENT, Facts, Rule, Verdict
from manyhands.analysis.scaling import Baseline
from manyhands.core import formatting
from manyhands.core.statistics import NOISY, Summary, measured, ratio
from manyhands.records.record import RunRecord

STALE = 4.0  # updates: the effect of less staleness is smaller than the difference between seeds
FULL = 0.85  # share of the memory: above, with a larger batch the system may kill a worker
ASIDE = 0.25  # share of the wall clock: evaluations are needed, but should not take a quarter of the time


def diverged(facts: Facts) -> Verdict | None:
    """The loss became infinite or NaN."""
    record = facts.record
    if record.status != "diverged":
        return None
    text = f"the loss became infinite or NaN at step {record.steps:,} ({record.recipe_line})"
    return Verdict("diverged", f"{text}: lower the learning rate or use a longer warm-up.", 0.0)


def interrupted(facts: Facts) -> Verdict | None:
    """The run was interrupted before its end."""
    if facts.record.status != "interrupted":
        return None
    text = f"the run was interrupted at step {facts.record.steps:,} and does not count as having reached its"
    return Verdict("interrupted", f"{text} target; continue with: {_resume(facts)}.", 0.0)


def _resume(facts: Facts) -> str:
    return f"manyhands train --resume {facts.record.run}"


def _against(record: RunRecord, baseline: Baseline) -> Summary:
    """The throughput of a run relative to a baseline, with the noise of both."""
    return ratio(measured([record.throughput]), baseline.throughput)


def slower_than_one(facts: Facts) -> Verdict | None:
    """Several workers are slower than one."""
    record, baseline = facts.record, facts.baseline
    if not facts.timed or baseline is None or record.spec.workers < 2:
        return None
    share = _against(record, baseline)
    if share.high >= 1:
        return None
    done = formatting.percent(share.median)
    text = f"{groups.workers_text(record)} do {done} of what {baseline.spoken} does with batch"
    return Verdict("slower-than-one", f"{text} {baseline.batch:,}: they do not pay off here.", 0.0)


def threads_win(facts: Facts) -> Verdict | None:
    """One worker with all cores as threads is faster: what a user would run without manyhands."""
    record, baseline = facts.record, facts.threads_baseline
    if not facts.timed or baseline is None or record.spec.workers < 2:
        return None
    share = _against(record, baseline)
    if share.high >= 1:
        return None
    ahead = 1 / share.median
    text = f"plain threads win: {baseline.spoken} is {ahead:.2f}x as fast with batch {baseline.batch:,}."
    return Verdict("threads-win", text, 0.0)


def near_the_limit(facts: Facts) -> Verdict | None:
    """Several workers spend nearly all of the step computing."""
    record = facts.record
    if not facts.timed or record.spec.workers < 2 or groups.crowded(record) or threads_win(facts):
        return None
    lost = sum(facts.share(name) for name in ("communication", "wait", "data", "other"))
    if lost > 1 - EFFICIENT:
        return None
    text = f"{formatting.percent(1 - lost)} of the step is computing"
    if facts.baseline is not None and facts.baseline.threads == 1:
        speed_up = record.throughput / facts.baseline.throughput.median
        efficiency = speed_up / (record.spec.workers * groups.threads(record))
        if efficiency < EFFICIENT:
            return None
        text += f", {formatting.percent(efficiency)} of {record.spec.workers * groups.threads(record)}x"
        text += f" {facts.baseline.spoken}"
    return Verdict("near-the-limit", f"{text}: near the limit of these workers.", 0.0)


def staleness(facts: Facts) -> Verdict | None:
    """Gradients were computed from old parameters."""
    mean = facts.record.mean_staleness
    if mean is None or mean < STALE:
        return None
    text = f"updates are {mean:.1f} steps stale on average, at most {max(facts.record.staleness)}"
    if not facts.record.spec.traits.serves:
        return Verdict("staleness", f"{text}: fewer workers, or `server --bound 4`, keep it down.", 0.0)
    if not facts.record.spec.strategy_options.get("staleness_aware"):
        text += ": `--staleness-aware` divides the learning rate of each by it, `--bound 4` keeps it down"
    return Verdict("staleness", f"{text}.", 0.0)


def memory(facts: Facts) -> Verdict | None:
    """The memory of a host is nearly full."""
    record = facts.record
    if record.environment.device != "cpu" or record.environment.memory <= 0:
        return None
    hosts: Counter[str] = Counter()
    for rank, nbytes in enumerate(record.memory or [record.peak_memory] * record.spec.ranks):
        hosts[record.hosts[rank] if rank < len(record.hosts) else ""] += nbytes
    held, whole = max(hosts.values(), default=0), record.environment.memory
    if held < FULL * whole:
        return None
    text = (
        f"{groups.workers_text(record)} hold {formatting.size(held)} of {formatting.size(whole)} "
        f"of memory: a larger batch may"
    )
    return Verdict("memory", f"{text} not fit; `--offload auto` or `sharded` need less.", 0.0)


def aside(facts: Facts) -> Verdict | None:
    """Evaluation and checkpoints take a large share of the wall clock."""
    record = facts.record
    share = 1 - record.training_seconds / record.seconds if record.seconds > 0 else 0.0
    if not facts.timed or share < ASIDE:
        return None
    text = (
        f"{formatting.percent(share)} of the wall clock went into evaluation and "
        f"checkpoints, which no speed-up"
    )
    return Verdict(
        "aside", f"{text} counts; `--evaluate-every` and `--checkpoint-every` make them rarer.", 0.0
    )


def lost_workers(facts: Facts) -> Verdict | None:
    """Workers were lost while the others continued."""
    lost = facts.record.lost
    if not lost:
        return None
    were = "was" if len(lost) == 1 else "were"
    count = formatting.plural(len(lost), "worker")
    text = f"{count} {were} lost during the run, so its speed is that of fewer workers:"
    return Verdict("lost", f"{text} {'; '.join(lost)}.", 0.0)


def noisy(facts: Facts) -> Verdict | None:
    """The machine was busy with something else during the run."""
    noise = facts.record.machine_noise
    if noise is None or noise <= NOISY or not facts.record.timed:
        return None
    text = (
        f"the machine was {formatting.percent(noise)} slower around this run than at its "
        f"best: do not trust its"
    )
    return Verdict("noisy", f"{text} times.", 0.0)


def unmeasured(facts: Facts) -> Verdict | None:
    """The run was too short to exclude its first, slow steps."""
    if (
        not facts.record.timed
        or facts.record.worker_step_times is not None
        or facts.record.status == "diverged"
    ):
        return None
    text = (
        f"no steady speed was measured in {formatting.plural(facts.record.steps, 'step')}: "
        f"the times include the"
    )
    return Verdict("unmeasured", f"{text} first, slow ones.", 0.0)


RULES: list[tuple[str, Rule]] = [
    ("diverged", diverged),
    ("interrupted", interrupted),
    ("slower-than-one", slower_than_one),
    ("threads-win", threads_win),
    ("near-the-limit", near_the_limit),
    ("lost", lost_workers),
    ("staleness", staleness),
    ("memory", memory),
    ("aside", aside),
    ("noisy", noisy),
    ("unmeasured", unmeasured),
]
