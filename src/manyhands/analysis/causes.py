"""Rules about lost time: each checks the mean step of a run for one cause, its cost and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.breakdown import Breakdown, breakdown, compute, rank_phases
from manyhands.analysis.scaling import Baseline
from manyhands.core import formatting
from manyhands.core.registry.strategies import STRATEGIES, having
from manyhands.records.record import RunRecord

EFFICIENT = 0.85  # share of the step spent computing that good systems reach (Goyal et al.: 90 %, 256 GPUs)
COMMUNICATION = 1 - EFFICIENT  # share of the step; with less, the step is efficient already
WAITING = 0.10  # share of the step; steps of equal ranks vary by a few percent, so some waiting is normal
SLOWEST = 0.05  # a rank this much slower than the others is the slowest, and not just by chance
DATA = 0.10  # share of the step; data that is prefetched costs two or three percent
OPTIMIZER = 0.15  # share of the step; a small batch has 0.1; with more, the batch is too small for the model
OVERHEAD = 0.15  # share of the step; the trainer itself takes a few percent of any step worth parallelizing
SLOWER_COMPUTE = 1.25  # times as long per sample; less is noise between two runs
MOST = 64  # largest factor for the batch, or for the steps between averages, that is worth recommending
MICRO_BATCHES = 4  # per stage; GPipe recommends this for a small bubble


class Verdict(NamedTuple):
    """One finding about a run or a study, in a sentence."""

    rule: str
    text: str
    lost: float  # the share of the step that would be gained; 0 for remarks


class Facts(NamedTuple):
    """The input of every rule."""

    record: RunRecord
    step: Breakdown
    baseline: Baseline | None
    threads_baseline: Baseline | None
    timed: bool  # whether its times count

    def share(self, phase: str) -> float:
        """A phase as a share of the mean step."""
        return self.step.phases[phase] / self.step.step_seconds if self.step.step_seconds > 0 else 0.0


Rule = Callable[[Facts], Verdict | None]


def facts(record: RunRecord, baseline: Baseline | None, threads_baseline: Baseline | None) -> Facts:
    """Collect the facts about a run."""
    step = breakdown(record)
    return Facts(record, step, baseline, threads_baseline, groups.measured(record) and step.step_seconds > 0)


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
    ways = [way for way in (_larger_batch(facts), _rarer(facts)) if way]
    if not ways:
        return "neither a larger batch nor rarer exchanges would make up for it: use fewer workers"
    (first, reached), *more = ways
    others = "".join(f", {way} {formatting.percent(share)}" for way, share in more)
    return f"at this bandwidth {first} would reach {formatting.percent(reached)} efficiency{others}"


def _larger_batch(facts: Facts) -> tuple[str, float] | None:
    """A batch that makes the step efficient: computing grows with it, communication and optimizer do not."""
    fixed = facts.step.phases["optimizer"]
    talking = facts.step.phases["communication"]
    growing = facts.step.step_seconds - fixed - talking
    batch = facts.step.batch
    for factor in _powers():
        busy = factor * growing + fixed
        reached = busy / (busy + talking)
        if factor * batch <= facts.record.train_samples and reached >= EFFICIENT:
            return f"a batch of {factor * batch:,}", reached
    return None


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
    """Ranks wait for the slowest one, or for the servers."""
    share = facts.share("wait")
    if not facts.timed or facts.record.spec.traits.staged or share < WAITING:
        return None
    rank, behind = slowest(facts.record)
    text = f"{formatting.percent(share)} of the step is waiting"
    if facts.record.spec.servers:
        text += f" for {formatting.plural(facts.record.spec.servers, 'server')} to answer; {_servers(facts)}."
    elif behind >= SLOWEST:
        text += (
            f" for rank {rank}{_where(facts.record, rank)}, which computes "
            f"{formatting.percent(behind)} longer"
        )
        text += f" than the others; as fast as they are it would make the step {gain(share)} faster."
    else:
        text += f" for each other, though no rank is slower than the rest{_varying(facts.record)}:"
        text += " look for what else runs on the machine, or let workers go at their own pace with `server`."
    return Verdict("stragglers", text, share)


def _servers(facts: Facts) -> str:
    more = 2 * facts.record.spec.servers
    rarely = 2 * int(facts.record.spec.strategy_options.get("push_every", 1))
    return (
        f"`--servers {more}` would halve what each has to do, `--push-every {rarely}` how often it is asked"
    )


def slowest(record: RunRecord) -> tuple[int, float]:
    """The rank with the longest data and compute time, and by how much it exceeds the mean of the others."""
    seconds = {
        rank: compute(phases) + phases.get("data", 0.0) for rank, phases in rank_phases(record).items()
    }
    if len(seconds) < 2:
        return next(iter(seconds), 0), 0.0
    rank = max(seconds, key=lambda each: seconds[each])
    others = [value for each, value in seconds.items() if each != rank]
    mean = sum(others) / len(others)
    return rank, seconds[rank] / mean - 1 if mean > 0 else 0.0


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
    better = MICRO_BATCHES * spec.stages
    text = f"{formatting.percent(share)} of the step the {spec.stages} stages wait for each other; "
    if spec.traits.serial:
        text += f"one batch at a time keeps one of them busy: `pipeline --micro-batches {better}` would"
        text += f" leave {formatting.percent(idle(spec.stages, better))} idle."
    elif spec.micro_batches < better:
        text += f"{formatting.plural(spec.micro_batches, 'micro-batch', 'micro-batches')} leave"
        text += f" {formatting.percent(idle(spec.stages, spec.micro_batches))} idle by themselves,"
        text += f" `--micro-batches {better}` {formatting.percent(idle(spec.stages, better))}."
    else:
        rank, behind = slowest(facts.record)
        text += f"{spec.micro_batches} micro-batches alone leave"
        text += f" {formatting.percent(idle(spec.stages, spec.micro_batches))} idle: rank {rank} computes"
        text += f" {formatting.percent(behind)} longer than the others, so cut the model elsewhere."
    return Verdict("bubble", text, share)


def idle(stages: int, micro_batches: int) -> float:
    """The share of its time that a pipeline stage is idle."""
    return (stages - 1) / (micro_batches + stages - 1)


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
    if longer is None or facts.baseline is None or longer < SLOWER_COMPUTE:
        return None
    spec, each = facts.record.spec, facts.step.batch / facts.record.spec.replicas
    if each >= facts.baseline.batch:
        return None
    wanted = facts.baseline.batch * spec.replicas
    text = f"each worker computes on {each:g} samples per step and takes {longer:.1f}x as long per sample as"
    text += f" {facts.baseline.spoken} does with {facts.baseline.batch:,};"
    text += f" a batch of {wanted:,} may make up for it."
    return Verdict("small-batch", text, _computing(facts) * (1 - 1 / longer))


def contention(facts: Facts) -> Verdict | None:
    """Workers slow each other down although each has its own core."""
    longer = _longer(facts)
    if longer is None or facts.baseline is None or longer < SLOWER_COMPUTE:
        return None
    if facts.step.batch / facts.record.spec.replicas < facts.baseline.batch or facts.record.spec.workers < 2:
        return None
    text = (
        f"a worker takes {longer:.1f}x as long for a sample as {facts.baseline.spoken}, though its batch is"
    )
    text += " no smaller and every worker has a core: they share memory bandwidth and caches, so fewer may do"
    return Verdict("contention", f"{text} as much.", _computing(facts) * (1 - 1 / longer))


def _longer(facts: Facts) -> float | None:
    """Compute time per sample relative to the baseline's time per sample; None if they cannot be compared."""
    spec = facts.record.spec
    if not facts.timed or facts.baseline is None or spec.stages > 1 or groups.crowded(facts.record):
        return None
    own = groups.threads(facts.record)
    if own != facts.baseline.threads or facts.step.batch == 0:
        return None
    seconds = compute(facts.step.phases) / (facts.step.batch / spec.replicas)
    return seconds * facts.baseline.throughput.median


def _computing(facts: Facts) -> float:
    return facts.share("forward") + facts.share("backward")


def oversubscribed(facts: Facts) -> Verdict | None:
    """There are more threads than cores."""
    record = facts.record
    if not groups.crowded(record):
        return None
    ranks, threads, cores = groups.busiest_host(record), groups.threads(record), record.environment.cores
    who = f"{ranks} processes" if record.spec.servers else formatting.plural(ranks, "worker")
    if threads > 1:
        who += f" x {threads} threads" if ranks > 1 else f" with {threads} threads"
    share = 1 - 1 / groups.crowding(record)
    text = (
        f"{who} {'share' if ranks > 1 else 'shares'} {formatting.plural(cores, 'core')}, so each waits up to"
    )
    text += (
        f" {formatting.percent(share)} of the time for its turn; with {ranks * threads} cores the step could"
    )
    return Verdict("oversubscribed", f"{text} be up to {gain(share)} faster.", share)


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
        if less <= OPTIMIZER / 2 and factor * facts.step.batch <= facts.record.train_samples:
            text += f"; a batch of {factor * facts.step.batch:,} would bring it to {formatting.percent(less)}"
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
    return Verdict("overhead", f"{text} own work, the same for any batch: a larger one would help.", share)


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
