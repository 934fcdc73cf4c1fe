"""What a rule about a run starts from, and what it says: facts and verdicts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

from manyhands.analysis import groups
from manyhands.analysis.breakdown import Breakdown, breakdown, busy_threads
from manyhands.analysis.scaling import Baseline, Point
from manyhands.core import plausible
from manyhands.core.plausible import SEVERAL
from manyhands.core.statistics import NOISY, Estimate, Summary, measured, ratio
from manyhands.records.record import RunRecord

COUNTED = 20  # steps: with fewer, one slow step moves the mean by more than the machine's noise does
TURNS = 1.05  # busy threads per core: from here on threads wait for each other's turn


class Verdict(NamedTuple):
    """One finding about a run or a study, in a sentence."""

    rule: str
    text: str
    lost: float  # the share of the step that would be gained; 0 for remarks


class Context(NamedTuple):
    """What is known beside a run: its baselines, its cell over all repeats, and the critical batch."""

    baseline: Baseline | None = None  # one worker with one thread
    threads_baseline: Baseline | None = None  # one worker with all cores as threads
    point: Point | None = None
    critical_batch: Estimate | None = None


class Facts:
    """The input of every rule: a run, what its mean step consists of, and how it compares."""

    def __init__(self, record: RunRecord, context: Context) -> None:
        self.record, self.context = record, context
        self.baseline, self.threads_baseline = context.baseline, context.threads_baseline
        self.timed = groups.measured(record)  # whether its times count

    @cached_property
    def step(self) -> Breakdown:
        """The mean step."""
        return breakdown(self.record)

    def share(self, phase: str) -> float:
        """A phase as a share of the mean step; 0 if the times of the run do not count."""
        if not self.timed or self.step.step_seconds <= 0:
            return 0.0
        return self.step.phases[phase] / self.step.step_seconds

    @cached_property
    def counted(self) -> int:
        """The steps that were measured; asynchronous workers are measured one by one, and added."""
        trained = [times.steps for times in self.record.step_times[self.record.spec.servers :] if times]
        return sum(trained) if self.record.spec.traits.asynchronous else max(trained, default=0)

    @property
    def enough(self) -> bool:
        """Whether the speed of the run can be compared: enough steps, or several measurements."""
        return self.timed and (self.several or self.counted >= COUNTED)

    @property
    def several(self) -> bool:
        """Whether the cell of the run was measured several times."""
        return self.context.point is not None and self.context.point.throughput.n >= SEVERAL

    @cached_property
    def speed_up(self) -> Summary | None:
        """The speed-up over one worker with one thread, with its interval."""
        point = self.context.point
        return self._over(self.baseline, point.speed_up if point else None)

    @cached_property
    def against_threads(self) -> Summary | None:
        """The speed-up over one worker with all cores as threads, with its interval."""
        point = self.context.point
        return self._over(self.threads_baseline, point.against_threads if point else None)

    def _over(self, baseline: Baseline | None, known: Summary | None) -> Summary | None:
        if baseline is None or not self.timed:
            return None
        share = known or ratio(measured([self.record.throughput]), baseline.throughput)
        return share if self.several else self.quiet(share)

    def quiet(self, share: Summary) -> Summary:
        """The same with an upper end for a quiet machine, if it was noisy during this run."""
        noise = self.record.machine_noise or 0.0
        return share._replace(high=share.high * (1 + noise)) if noise > NOISY else share

    @cached_property
    def limit(self) -> int:
        """The largest speed-up that the cores or devices of this run can give."""
        return limit_of(self.record)

    @cached_property
    def busy(self) -> float:
        """Threads that would compute at the same time on the busiest host, if each had a core."""
        return busy_threads(self.record)

    @property
    def crowded(self) -> bool:
        """Whether more threads would compute at the same time than the host has cores."""
        return groups.crowded(self.record) and self.busy > TURNS * self.record.environment.cores


Rule = Callable[[Facts], Verdict | None]


def limit_of(record: RunRecord) -> int:
    """The largest speed-up that the cores or devices of a run can give."""
    spec, machine = record.spec, record.environment
    return plausible.limit(
        spec.workers,
        groups.threads(record),
        cores=machine.cores,
        hosts=record.hosts[spec.servers :],
        device=machine.device,
    )
