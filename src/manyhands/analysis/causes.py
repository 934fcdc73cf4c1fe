"""Rules about lost time: each checks the mean step of a run for one cause, its cost and what to do."""

from __future__ import annotations

from manyhands.analysis import groups, stages
from manyhands.analysis.breakdown import compute, rank_phases
from manyhands.analysis.facts import Facts, Rule, Verdict
from manyhands.core import formatting
from manyhands.core.registry.strategies import DATA_PARALLEL, STRATEGIES, having
from manyhands.core.statistics import Estimate, Summary, measured, ratio
from manyhands.records.record import RunRecord

EFFICIENT = 0.85  # share of the step spent computing that good systems reach (Goyal et al.: 90 %, 256 GPUs)
COMMUNICATION = 1 - EFFICIENT  # share of the step; with less, the step is efficient already
WAITING = 0.10  # share of the step; steps of equal ranks vary by a few percent, so some waiting is normal
EXPLAINS = 0.5  # share of the waiting: a rank that computes this much longer than the others is its cause
DATA = 0.10  # share of the step; data that is prefetched costs two or three percent
OPTIMIZER = 0.15  # share of the step; a small batch has 0.1; with more, the batch is too small for the model
OVERHEAD = 0.15  # share of the step; the trainer itself takes a few percent of any step worth parallelizing
SLOWER_COMPUTE = 1.25  # times as long per sample; less is not worth a remark, even where it is certain
MOST = 64  # largest factor for the batch, or for the steps between averages, that is worth recommending
MICRO_BATCHES = 4  # per stage; GPipe recommends this for a small bubble
BETTER = 0.02  # share of the step: a way to lose less must save as much


def communication(facts: Facts) -> Verdict | None:
    """Exposed communication, and how to reduce it."""
    share = facts.share("communication")
    if not facts.timed or share < COMMUNICATION:
        return None
    seconds = facts.step.phases["communication"]
    text = f"{formatting.percent(share)} of the step is exposed communication"
    if (volume := facts.step.bytes_per_step) > 0:
        text += f" of {formatting.size(volume)} at {formatting.size(volume / seconds)}/s"
    return Verdict("communication", f"{text}; {_communication_advice(facts)}.", share)


def _communication_advice(facts: Facts) -> str:
    if facts.record.spec.traits.staged:
        return "it grows with the batch: fewer stages, or sharing the batch with `allreduce`, would avoid it"
    critical = facts.context.critical_batch
    larger, rarer = _larger_batch(facts), _rarer(facts)
    ways = [way for way in (larger, rarer) if way]
    if not ways:
        below = f" below the critical batch of about {_about(critical)}" if critical else ""
        return f"neither a larger batch{below} nor rarer exchanges would make up for it: use fewer workers"
    (first, reached), *more = ways
    others = "".join(f", {way} {formatting.percent(share)}" for way, share in more)
    text = f"at this bandwidth {first} would reach {formatting.percent(reached)} efficiency{others}"
    if larger and rarer and critical:
        below = f"the batch is below the critical batch of about {_about(critical)}"
        return f"{text}; {below}, but rarer exchanges may need more samples to the target"
    if larger and critical:
        return f"{text}; it is below the critical batch of about {_about(critical)}"
    either = "either" if larger and rarer else "it"
    return f"{text}, but {either} may need more samples to the target"


def _about(batch: Estimate) -> str:
    return f"{float(f'{batch.value:.2g}'):,.0f}"


def _larger_batch(facts: Facts) -> tuple[str, float] | None:
    """A batch that makes the step efficient: computing grows with it, communication and optimizer do not.

    None beyond the critical batch, where a larger batch saves hardly any steps.
    """
    fixed = facts.step.phases["optimizer"]
    talking = facts.step.phases["communication"]
    growing = facts.step.step_seconds - fixed - talking
    batch = facts.step.batch
    for factor in _powers():
        busy = factor * growing + fixed
        reached = busy / (busy + talking)
        if factor * batch <= _largest_batch(facts) and reached >= EFFICIENT:
            return f"a batch of {factor * batch:,}", reached
    return None


def _largest_batch(facts: Facts) -> float:
    critical = facts.context.critical_batch
    return min(facts.record.train_samples, critical.value) if critical else facts.record.train_samples


def _rarer(facts: Facts) -> tuple[str, float] | None:
    """An interval between exchanges that makes the step efficient."""
    spec = facts.record.spec
    if option := spec.traits.interval:
        name, now = spec.strategy, groups.option(facts.record, option)
    else:
        name, now = having("averaging")[0], 1
        option = STRATEGIES[name].interval
    flag = option.replace("_", "-")
    talking = facts.step.phases["communication"]
    busy = facts.step.step_seconds - talking
    for factor in _powers():
        reached = busy / (busy + talking / factor)
        if isinstance(now, int) and reached >= EFFICIENT:
            return f"`{name} --{flag} {factor * now}`", reached
    return None


def stragglers(facts: Facts) -> Verdict | None:
    """Ranks wait for the slowest one, or for the servers; where there are too few cores, for a core."""
    share = facts.share("wait")
    if not facts.timed or facts.record.spec.traits.staged or facts.crowded or share < WAITING:
        return None
    rank, behind, longer = slowest(facts.record)
    alone = min(longer / facts.step.step_seconds, 1.0)  # the share of the step that only this rank computes
    text = f"{formatting.percent(share)} of the step is waiting"
    if facts.record.spec.servers:
        text += f" for {formatting.plural(facts.record.spec.servers, 'server')} to answer; {_servers(facts)}."
    elif alone >= EXPLAINS * share:
        text += f" for rank {rank}{_where(facts.record, rank)}, which computes {formatting.percent(behind)}"
        text += f" longer than the others; as fast as they are it would make the step {gain(alone)} faster."
        share = alone
    else:
        text += f" for each other, and no rank is slow enough to explain it{_varying(facts.record)}:"
        free = having("serves")[0]
        text += f" look for what else runs on the machine; with `{free}` no worker waits for another."
    return Verdict("stragglers", text, share)


def _servers(facts: Facts) -> str:
    more = 2 * facts.record.spec.servers
    rarely = 2 * int(facts.record.spec.strategy_options.get("push_every", 1))
    return (
        f"`--servers {more}` would halve what each has to do, `--push-every {rarely}` how often it is asked"
    )


def slowest(record: RunRecord) -> tuple[int, float, float]:
    """The rank that takes longest for data and compute; how much longer, as a share and in seconds."""
    seconds = {
        rank: compute(phases) + phases.get("data", 0.0) for rank, phases in rank_phases(record).items()
    }
    if len(seconds) < 2:
        return next(iter(seconds), 0), 0.0, 0.0
    rank = max(seconds, key=lambda each: seconds[each])
    others = [value for each, value in seconds.items() if each != rank]
    mean = sum(others) / len(others)
    return rank, seconds[rank] / mean - 1 if mean > 0 else 0.0, seconds[rank] - mean


def _where(record: RunRecord, rank: int) -> str:
    return f" on {record.hosts[rank]}" if len(set(record.hosts)) > 1 and rank < len(record.hosts) else ""


def _varying(record: RunRecord) -> str:
    times = record.worker_step_times
    if times is None or times.high <= 1.1 * times.median:
        return ""
    return (
        f" (one step of ten takes {formatting.percent(times.high / times.median - 1)} longer than the median)"
    )


def bubble(facts: Facts) -> Verdict | None:
    """Stages wait for each other's activations and gradients."""
    spec, share = facts.record.spec, facts.share("wait")
    if not facts.timed or not spec.traits.staged or spec.stages < 2 or share < WAITING:
        return None
    text = f"{formatting.percent(share)} of the step the {spec.stages} stages wait for each other; "
    known = stages.shares(facts.record)
    parts = known or [1 / spec.stages] * spec.stages
    text += _more_micro_batches(facts.record, parts)
    least = stages.idle(parts)
    if known and least >= WAITING:
        text += f"; {stages.uneven(parts)}, so no number of micro-batches leaves less than"
        text += f" {formatting.percent(least)} idle: {_cut_advice(facts.record)}"
    elif known is None:
        text += ", if all stages have the same work"
    if groups.crowded(facts.record):
        cores = formatting.plural(facts.record.environment.cores, "core")
        text += f"; the stages share {cores}, and these shares are for one core per stage"
    return Verdict("bubble", f"{text}.", share)


def _more_micro_batches(record: RunRecord, parts: list[float]) -> str:
    """What the micro-batches leave idle by themselves, and what more of them would."""
    spec, name = record.spec, next(name for name in having("staged") if not STRATEGIES[name].serial)
    now = 1 if spec.traits.serial else max(1, spec.micro_batches)
    more = min(MICRO_BATCHES * spec.stages, max(1, groups.batch(record) // spec.replicas))
    leaves = formatting.percent(stages.idle(parts, now))
    alone = f"one batch at a time leaves {leaves} idle by itself"
    text = alone if now == 1 else f"{now} micro-batches leave {leaves} idle by themselves"
    if more > now and stages.idle(parts, now) - stages.idle(parts, more) >= BETTER:
        flag = f"`{f'{name} ' if spec.traits.serial else ''}--micro-batches {more}`"
        text += f", {flag} would leave {formatting.percent(stages.idle(parts, more))}"
    return text


def _cut_advice(record: RunRecord) -> str:
    if record.spec.strategy_options.get("cut"):
        return "without `--cut` it is cut as evenly as its blocks allow"
    if record.spec.stages == 2:
        return f"its blocks allow no more even cut; with `{DATA_PARALLEL}` no worker waits for a stage"
    return "its blocks allow no more even cut, so use fewer stages"


def data(facts: Facts) -> Verdict | None:
    """Workers wait for their samples."""
    share = facts.share("data")
    if not facts.timed or share < DATA:
        return None
    text = (
        f"{formatting.percent(share)} of the step is waiting for data; held in memory or "
        f"prepared beforehand it"
    )
    return Verdict("data", f"{text} would make the step {gain(share)} faster.", share)


def small_batch(facts: Facts) -> Verdict | None:
    """Each worker's share of the batch is too small to compute efficiently."""
    longer = _longer(facts)
    if longer is None or facts.baseline is None:
        return None
    spec, each = facts.record.spec, facts.step.batch / facts.record.spec.replicas
    if each >= facts.baseline.batch:
        return None
    wanted = facts.baseline.batch * spec.replicas
    text = f"each worker computes on {each:g} samples per step and takes {longer:.1f}x as long per sample as"
    text += f" {facts.baseline.spoken} does with {facts.baseline.batch:,};"
    text += f" a batch of {wanted:,} may make up for it{_price_of_batch(facts, wanted)}."
    return Verdict("small-batch", text, _computing(facts) * (1 - 1 / longer))


def _price_of_batch(facts: Facts, batch: int) -> str:
    """What a larger batch may cost, as far as the critical batch is known."""
    critical = facts.context.critical_batch
    if critical is None:
        return ", but may need more samples to the target"
    if batch <= critical.value:
        return ""
    return f", but is beyond the critical batch of about {_about(critical)}: fewer workers are better"


def contention(facts: Facts) -> Verdict | None:
    """Workers slow each other down although each has its own core."""
    longer = _longer(facts)
    if longer is None or facts.baseline is None:
        return None
    if facts.step.batch / facts.record.spec.replicas < facts.baseline.batch or facts.record.spec.workers < 2:
        return None
    text = (
        f"a worker takes {longer:.1f}x as long for a sample as {facts.baseline.spoken}, though its batch is"
    )
    text += " no smaller and every worker has a core. Perhaps they compete for memory bandwidth and caches:"
    return Verdict("contention", f"{text} fewer may do as much.", _computing(facts) * (1 - 1 / longer))


def _longer(facts: Facts) -> float | None:
    """Compute time per sample relative to the baseline's; None if it is not longer, or cannot be compared."""
    spec = facts.record.spec
    if not facts.enough or facts.baseline is None or spec.stages > 1 or groups.crowded(facts.record):
        return None
    seconds = compute(facts.step.phases)
    if groups.threads(facts.record) != facts.baseline.threads or facts.step.batch == 0 or seconds <= 0:
        return None
    computed = facts.step.batch / spec.replicas / seconds  # samples per second of one worker
    share = facts.quiet(ratio(measured([computed]), facts.baseline.throughput))
    return 1 / share.median if share.high < 1 and share.median <= 1 / SLOWER_COMPUTE else None


def _computing(facts: Facts) -> float:
    return facts.share("forward") + facts.share("backward")


def oversubscribed(facts: Facts) -> Verdict | None:
    """More threads would compute at the same time than there are cores."""
    record = facts.record
    if not facts.crowded:
        return None
    ranks, threads = groups.busiest_host(record), groups.threads(record)
    who = f"{ranks} processes" if record.spec.servers else formatting.plural(ranks, "worker")
    if threads > 1:
        who += f" x {threads} threads" if ranks > 1 else f" with {threads} threads"
    cores = record.environment.cores
    text = f"{who} {'share' if ranks > 1 else 'shares'} {formatting.plural(cores, 'core')}"
    turns = Verdict("oversubscribed", f"{text}, so at most {cores} of their threads run at a time.", 0.0)
    if facts.baseline is None or facts.speed_up is None or not facts.enough:
        return turns
    done = of_limit(facts.speed_up, facts.limit)
    if done.low > 1:  # implausible
        return turns
    can = f"what {formatting.plural(facts.limit, 'core')} can do ({facts.limit}x {facts.baseline.spoken})"
    if done.high >= 1:
        return Verdict("oversubscribed", f"{text}; their speed is not told apart from {can}.", 0.0)
    lost = 1 - done.median
    text += f" and do {formatting.percent(done.median)} of {can}"
    return Verdict("oversubscribed", f"{text}: at most {formatting.percent(lost)} is lost by that.", lost)


def of_limit(speed_up: Summary, limit: int) -> Summary:
    """A speed-up as a share of the largest possible one."""
    return Summary(speed_up.median / limit, speed_up.low / limit, speed_up.high / limit, speed_up.n)


def optimizer(facts: Facts) -> Verdict | None:
    """The optimizer's update takes a large share of the step."""
    share = facts.share("optimizer")
    if not facts.timed or share < OPTIMIZER:
        return None
    text = f"{formatting.percent(share)} of the step is the optimizer's update of {facts.record.parameters:,}"
    text += " parameters, the same for any batch"
    fixed = facts.step.phases["optimizer"] + facts.step.phases["communication"]
    for factor in _powers():
        less = facts.step.phases["optimizer"] / (factor * (facts.step.step_seconds - fixed) + fixed)
        if less <= OPTIMIZER / 2 and factor * facts.step.batch <= _largest_batch(facts):
            text += f"; a batch of {factor * facts.step.batch:,} would bring it to {formatting.percent(less)}"
            text += _price_of_batch(facts, factor * facts.step.batch)
            break
    return Verdict("optimizer", f"{text}.", share)


def overhead(facts: Facts) -> Verdict | None:
    """Steps are so short that the overhead of the trainer matters."""
    share = facts.share("other")
    if not facts.timed or share < OVERHEAD:
        return None
    text = (
        f"{formatting.percent(share)} of the "
        f"{formatting.duration(facts.step.step_seconds)} of a step is the trainer's"
    )
    return Verdict(
        "overhead",
        f"{text} own work, the same for any batch: steps with more samples have less of it.",
        share,
    )


def gain(share: float) -> str:
    """`1.28x`: how much faster the step would be without this share."""
    return f"{1 / max(1e-9, 1 - share):.2f}x"


def _powers() -> list[int]:
    return [2**power for power in range(1, MOST.bit_length())]


RULES: list[tuple[str, Rule]] = [
    ("communication", communication),
    ("stragglers", stragglers),
    ("bubble", bubble),
    ("data", data),
    ("small-batch", small_batch),
    ("contention", contention),
    ("oversubscribed", oversubscribed),
    ("optimizer", optimizer),
    ("overhead", overhead),
]
