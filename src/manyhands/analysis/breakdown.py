"""What a step consists of: its time by phase, bytes, memory, and how much the ranks differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.records.phases import ASIDE, PHASES, training_phases
from manyhands.records.record import RunRecord

STEP_PHASES = tuple(name for name in PHASES if name not in ASIDE)
COMPUTE = ("forward", "backward")
ASLEEP = ("data", "communication", "wait")  # a stage or a server needs no core meanwhile


class Breakdown(NamedTuple):
    """The mean step of a run, averaged over the ranks that train."""

    task: str
    title: str
    variant: str
    workers: int
    batch: int
    step_seconds: float
    phases: dict[str, float]  # seconds
    bytes_per_step: float  # sent or received by one rank
    messages_per_step: float
    memory: int  # bytes of the largest rank
    rank_spread: float  # compute time of the slowest rank / mean - 1
    run: str
    threads: int = 1


def breakdowns(records: Iterable[RunRecord]) -> list[Breakdown]:
    """Return one breakdown per timed cell, that of its repeat with the median throughput."""
    everything = list(records)
    found = []
    for task in groups.tasks(everything):
        mine = filter(groups.measured, groups.of_task(everything, task))
        for group in groups.cells(mine).values():
            ordered = sorted(group, key=lambda record: (record.throughput, record.run))
            found.append(breakdown(ordered[len(ordered) // 2]))
    return found


def breakdown(record: RunRecord) -> Breakdown:
    ranks = list(rank_phases(record).values())
    phases = {name: _mean([rank.get(name, 0.0) for rank in ranks]) for name in STEP_PHASES}
    calls, nbytes = _traffic(record)
    return Breakdown(
        *(groups.task_name(record), groups.title(record), groups.variant(record)),
        workers=record.spec.workers,
        batch=groups.batch(record),
        step_seconds=sum(phases.values()),
        phases=phases,
        bytes_per_step=nbytes,
        messages_per_step=calls,
        memory=max(record.memory, default=record.peak_memory) or record.peak_memory,
        rank_spread=_spread([compute(rank) for rank in ranks]),
        run=record.run,
        threads=groups.threads(record),
    )


def rank_phases(record: RunRecord) -> dict[int, dict[str, float]]:
    """Seconds per step by phase, for every rank that trains and was not lost."""
    first = record.spec.servers
    measured = {rank: times.phases for rank, times in enumerate(record.step_times) if times and rank >= first}
    if measured:
        return {rank: training_phases(phases) for rank, phases in measured.items()}
    return {  # too few steps to exclude the first ones
        rank: {name: seconds / _steps(record, rank) for name, seconds in training_phases(phases).items()}
        for rank, phases in enumerate(record.phases)
        if phases and rank >= first
    }


def compute(phases: dict[str, float]) -> float:
    """Seconds of forward and backward."""
    return sum(phases.get(name, 0.0) for name in COMPUTE)


def busy_threads(record: RunRecord) -> float:
    """How many threads would compute at the same time on the busiest host, if each had a core.

    A server sleeps until it is asked, and a stage until its neighbor has finished: they count with the share
    of their time in which they compute. Workers that wait for each other, or exchange gradients, wait for a
    core where there are too few: they count as a whole.
    """
    spec, hosts = record.spec, dict[str, float]()
    for rank, phases in enumerate(record.phases):
        if not phases:
            continue  # lost
        host = record.hosts[rank] if rank < len(record.hosts) else ""
        sleeps = rank < spec.servers or spec.traits.staged or spec.traits.serves
        hosts[host] = hosts.get(host, 0.0) + (_busy_share(phases) if sleeps else 1.0)
    return groups.threads(record) * max(hosts.values(), default=0.0)


def _busy_share(phases: dict[str, float]) -> float:
    training = training_phases(phases)
    whole = sum(training.values())
    return 1 - sum(training.get(name, 0.0) for name in ASLEEP) / whole if whole > 0 else 0.0


def _traffic(record: RunRecord) -> tuple[float, float]:
    """Messages and bytes per step, averaged over the ranks that train."""
    calls, nbytes = [], []
    for rank, operations in enumerate(record.traffic):
        if rank >= record.spec.servers and operations:
            steps = _steps(record, rank)
            calls.append(sum(each.get("calls", 0.0) for each in operations.values()) / steps)
            nbytes.append(sum(each.get("bytes", 0.0) for each in operations.values()) / steps)
    return _mean(calls), _mean(nbytes)


def _steps(record: RunRecord, rank: int) -> int:
    """The steps of a rank in this session; those of the run if the rank did not report any."""
    share = record.shares[rank].steps if rank < len(record.shares) else 0
    return max(1, share or record.steps)


def _spread(seconds: Sequence[float]) -> float:
    mean = _mean(seconds)
    return max(seconds) / mean - 1 if mean > 0 else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
