"""How long a rank's steps take, and the spans of some of them: read from its clock only (law 7)."""

from __future__ import annotations

import statistics
from array import array
from typing import NamedTuple

from manyhands.engine.timing.clock import Clock
from manyhands.records.phases import PAUSED, Span, training_phases
from manyhands.records.record import StepTimes

WARM_UP = 5  # steps that do not count: memory is allocated, kernels are chosen
TRACED = 5  # steps after them whose spans are kept
MAX_SPANS = 400  # per step: a picture has no room for more
EVERY = 23  # steps between synchronized ones: a prime, so that periodic work is sampled fairly


class Mark(NamedTuple):
    """The totals of a rank after one of its steps."""

    samples: int
    seconds: float
    totals: dict[str, float]  # by phase; where only some steps are synchronized, of these
    synchronized: int  # steps
    unsynchronized: tuple[int, float]  # samples and seconds of the steps without synchronization


class StepTimer:
    """Called after each step; keeps its duration, and the spans of some steps.

    The `first` steps are left out of means: fewer where the whole session is short. On an asynchronous device
    it decides in which steps the clock synchronizes at each change of phase; the others run without (-):

        exact (the first, the traced) | - - - ... - | exact | - - - ... - | exact | ...
                           synchronize ^             ^       ^
    """

    def __init__(self, clock: Clock, first: int = WARM_UP, traced: int = TRACED) -> None:
        self._clock, self._first, self._traced = clock, first, traced
        self._samples = clock.asynchronous and traced > 0  # otherwise every step is exact
        self._marks: list[Mark] = []
        self._durations = array("d")
        self._unsynchronized = bytearray()  # one flag per step
        self.traced: list[list[Span]] = []

    def begin(self, samples: int) -> None:
        """Start before the first step."""
        self._clock.wait()
        self._totals = self._clock.stopped()
        none = dict.fromkeys(self._totals, 0.0) if self._samples else self._totals
        seconds = sum(training_phases(self._totals).values())
        self._last = Mark(samples, seconds, none, 0, (samples, seconds))
        self._marks = [self._last]
        self._durations, self._unsynchronized = array("d"), bytearray()
        if self._samples:
            self._clock.exact = True

    def stepped(self, samples: int) -> None:
        """Record a step; `samples` is the number of samples seen so far."""
        made, unsynchronized = len(self._durations) + 1, self._samples and not self._clock.exact
        synchronizes = made < self._first + self._traced or (made + 1) % EVERY == 0
        if unsynchronized and synchronizes:  # work that is still to do belongs to this step, not to the next
            self._clock.wait()
        self._record(samples, unsynchronized)
        if self._samples:
            self._clock.exact = synchronizes
        if self._traced:
            self._trace(made)

    def _record(self, samples: int, unsynchronized: bool) -> None:
        before, self._totals = self._totals, self._clock.stopped()
        last, seconds = self._last, sum(training_phases(self._totals).values())
        duration = seconds - last.seconds
        self._durations.append(duration)
        self._unsynchronized.append(unsynchronized)
        if not self._samples:
            self._last = Mark(samples, seconds, self._totals, last.synchronized + 1, (samples, seconds))
        elif unsynchronized:
            ran = (last.unsynchronized[0] + samples - last.samples, last.unsynchronized[1] + duration)
            self._last = last._replace(samples=samples, seconds=seconds, unsynchronized=ran)
        else:
            spent = {name: total + self._totals[name] - before[name] for name, total in last.totals.items()}
            self._last = Mark(samples, seconds, spent, last.synchronized + 1, last.unsynchronized)
        if len(self._marks) <= self._first:
            self._marks.append(self._last)

    def _trace(self, made: int) -> None:
        clock = self._clock
        if clock.trace is not None:
            self.traced.append(_joined(clock.trace))
        clock.trace = [] if self._first <= made < self._first + self._traced else None

    @property
    def step_times(self) -> StepTimes | None:
        """The times of the steps of this session without the first ones; None if there was no step."""
        since, durations = self._base()
        if since is None:
            return None
        spent = training_phases(self._last.totals)
        low = high = durations[0]
        if len(durations) > 1:  # inclusive: otherwise a decile of few steps can lie below the fastest
            low, *_, high = statistics.quantiles(durations, n=10, method="inclusive")
        synchronized = self._last.synchronized - since.synchronized
        return StepTimes(
            steps=len(self._durations) - self._left_out,
            mean=sum(durations) / len(durations),
            low=low,
            median=statistics.median(durations),
            high=high,
            phases={
                name: (seconds - since.totals[name]) / synchronized
                for name, seconds in spent.items()
                if seconds > since.totals[name]
            },
            synchronized_steps=synchronized,
        )

    @property
    def samples_per_second(self) -> float | None:
        """Of this session, without its first steps."""
        since, _ = self._base()
        if since is None:
            return None
        last = self._last
        samples = last.unsynchronized[0] - since.unsynchronized[0]
        seconds = last.unsynchronized[1] - since.unsynchronized[1]
        if not samples:  # few steps: each was synchronized
            samples, seconds = last.samples - since.samples, last.seconds - since.seconds
        return samples / seconds if seconds > 0 else None

    def _base(self) -> tuple[Mark | None, array[float]]:
        """The totals at which counting begins, and the durations from there that count."""
        left_out = self._left_out
        durations = self._durations[left_out:]
        flags = self._unsynchronized[left_out:]
        counted = array("d", (each for each, flag in zip(durations, flags, strict=True) if flag))
        return (self._marks[left_out] if durations else None), counted or durations

    @property
    def _left_out(self) -> int:
        return min(self._first, len(self._durations) // 4)


def _joined(spans: list[Span]) -> list[Span]:
    """Neighboring spans of one phase as one, so that reading the clock leaves no trace.

    A rank pauses between two steps; what it did before that belongs to neither of them.
    """
    joined: list[Span] = []
    for span in spans:
        if span.phase == PAUSED:
            joined.clear()
        elif joined and joined[-1].phase == span.phase:
            joined[-1] = Span(span.phase, joined[-1].begin, span.end)
        elif span.end > span.begin:
            joined.append(span)
    return joined[:MAX_SPANS]


def timeline(traced: list[list[list[Span]]], hosts: list[str], together: bool) -> list[list[Span]]:
    """What every rank did in one traced step, or in several where ranks do not step together.

    Of steps that all ranks make together it is the one of median duration. Clocks of different hosts do not
    agree: the first moment of each host is taken as the same.
    """
    if not any(traced):
        return []
    if together:
        number = _median_step(next(steps for steps in traced if steps))
        shown = [steps[number] if number < len(steps) else [] for steps in traced]
    else:
        shown = [_without_pause(steps) for steps in traced]
    zero: dict[str, float] = {}
    for spans, host in zip(shown, hosts, strict=True):
        if spans:
            zero[host] = min(zero.get(host, spans[0].begin), spans[0].begin)
    return [
        [
            Span(span.phase, round(span.begin - zero[host], 7), round(span.end - zero[host], 7))
            for span in spans
        ]
        for spans, host in zip(shown, hosts, strict=True)
    ]


def _without_pause(steps: list[list[Span]]) -> list[Span]:
    """The most of a rank's traced steps that follow each other without a pause."""
    stretches: list[list[list[Span]]] = []
    for step in filter(None, steps):
        if stretches and stretches[-1][-1][-1].end == step[0].begin:
            stretches[-1].append(step)
        else:
            stretches.append([step])
    return [span for step in max(stretches, key=len, default=[]) for span in step]


def _median_step(steps: list[list[Span]]) -> int:
    durations = [step[-1].end - step[0].begin if step else 0.0 for step in steps]
    return sorted(range(len(steps)), key=lambda number: durations[number])[len(steps) // 2]
