"""Rules that are not about lost time: how a run ended, what it held, and how reliable its times are."""

from __future__ import annotations

import math
from collections import defaultdict

from manyhands.analysis import groups
from manyhands.analysis.facts import COUNTED, Facts, Rule, Verdict
from manyhands.core import formatting
from manyhands.core.registry.strategies import having
from manyhands.core.statistics import NOISY

STALE = 0.5  # updates: below, most gradients are applied to the parameters that they were computed from
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


def staleness(facts: Facts) -> Verdict | None:
    """Gradients were computed from old parameters."""
    record = facts.record
    mean, options = record.mean_staleness, record.spec.strategy_options
    if mean is None or mean < STALE:
        return None
    text = f"updates are {mean:.1f} steps stale on average, at most {max(record.staleness)}; on a quadratic"
    text += f" loss that lowers the largest stable learning rate to {formatting.percent(stable(mean))}"
    bound = options.get("bound")
    idle = "" if bound is None else f"; `--bound {bound}` does not lower it while workers are equally fast"
    fewer = "fewer workers make it smaller"
    if options.get("staleness_aware"):
        text += f". The learning rate is divided by it already; {fewer}{idle}."
        return Verdict("staleness", text, 0.0)
    ways = "a lower learning rate makes up for it"
    if mean > 1:  # it divides by nothing smaller than 1
        server = "" if record.spec.traits.serves else f"{having('serves')[0]} "
        ways = f"a learning rate divided by {mean:.1f} or `{server}--staleness-aware` makes up for it"
    return Verdict("staleness", f"{text}. {fewer.capitalize()}, {ways}{idle}.", 0.0)


def stable(staleness: float) -> float:
    """The largest stable learning rate with this staleness, as a share of that without any.

    Of gradient descent on a quadratic loss with a constant delay: 2 sin(pi / (2 (2 s + 1))) / curvature.
    """
    return math.sin(math.pi / (2 * (2 * staleness + 1)))


def memory(facts: Facts) -> Verdict | None:
    """The memory of a host may be nearly full.

    The memory of a rank includes pages that it shares with others (parameters, libraries), so a host holds at
    least what its largest rank has and at most what they have together.
    """
    record = facts.record
    if record.environment.device != "cpu" or record.environment.memory <= 0:
        return None
    hosts: defaultdict[str, list[int]] = defaultdict(list)
    for rank, nbytes in enumerate(record.memory or [record.peak_memory] * record.spec.ranks):
        hosts[record.hosts[rank] if rank < len(record.hosts) else ""].append(nbytes)
    held, whole = max(hosts.values(), key=sum, default=[0]), record.environment.memory
    least, most = max(held), sum(held)
    if most < FULL * whole:
        return None
    if least < most:
        text = f"{groups.workers_text(record)} hold between {formatting.size(least)} (the largest) and"
        text += f" {formatting.size(min(most, whole))} of {formatting.size(whole)} of memory, depending on"
        text += " how much of it they share"
    else:
        text = f"the worker holds {formatting.size(least)} of {formatting.size(whole)} of memory"
    return Verdict(
        "memory", f"{text}: a larger batch may not fit; `--offload auto` or `sharded` need less.", 0.0
    )


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
    """The run was too short for a speed that can be compared."""
    record = facts.record
    if not record.timed or record.status == "diverged" or facts.enough:
        return None
    if not facts.counted:
        text = f"no steady speed was measured in {formatting.plural(record.steps, 'step')}: the times include"
        return Verdict("unmeasured", f"{text} the first, slow ones.", 0.0)
    if facts.counted >= COUNTED:
        return None  # interrupted: another rule says so
    text = f"only {formatting.plural(facts.counted, 'step')} counted, and {COUNTED} make a speed that can be"
    return Verdict("unmeasured", f"{text} compared: run it longer.", 0.0)


RULES: list[tuple[str, Rule]] = [
    ("diverged", diverged),
    ("interrupted", interrupted),
    ("lost", lost_workers),
    ("staleness", staleness),
    ("memory", memory),
    ("aside", aside),
    ("noisy", noisy),
    ("unmeasured", unmeasured),
]
