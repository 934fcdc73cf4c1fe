"""How long a rank's steps take and what it does in some of them: read from its clock alone (law 7)."""

from __future__ import annotations

import statistics
from array import array
from typing import NamedTuple

from manyhands.engine.timing.clock import Clock
from manyhands.records.phases import Span, training_phases
from manyhands.records.record import StepTimes

WARM_UP = 5  # steps that say nothing: memory is fetched, kernels are chosen
TRACED = 5  # steps after them whose phases are kept one by one
MOST = 400  # spans of a step: a picture has no room for more
EVERY = 23  # of so many steps one is synchronized: a prime, so that what comes every 16th step is met fairly


class Mark(NamedTuple):
    """Where a rank stood after one of its first steps."""

    samples: int
    seconds: float
    totals: dict[str, float]  # by phase; where only some steps are synchronized, of those
    synchronized: int  # steps
    free: tuple[int, float]  # samples and seconds of the steps whose lengths count


class StepTimer:
    """Told after each step; keeps its length, and of some steps every change of phase.

    `first` steps are left out of means: fewer where the whole sitting is short. On a device that works by
    itself it says which steps the clock times phase by phase; the others run free, from one wait to the next:

        exact (the first, the traced) | free free free ... free | exact | free free ... | exact | ...
                                      wait                    wait    wait
    """

    def __init__(self, clock: Clock, first: int = WARM_UP, traced: int = TRACED) -> None:
        self._clock, self._first, self._traced = clock, first, traced
        self._samples = clock.asynchronous and traced > 0  # else every step is timed, or somebody else says
        self._marks: list[Mark] = []
        self._lengths = array("d")
        self._free = bytearray()  # a step each: whether it ran free
        self.traced: list[list[Span]] = []

    def begin(self, samples: int) -> None:
        """Steps are made from here on."""
        self._clock.wait()
        self._totals = self._clock.stopped()
        none = dict.fromkeys(self._totals, 0.0) if self._samples else self._totals
        seconds = sum(training_phases(self._totals).values())
        self._last = Mark(samples, seconds, none, 0, (samples, seconds))
        self._marks = [self._last]
        self._lengths, self._free = array("d"), bytearray()
        if self._samples:
            self._clock.exact = True

    def stepped(self, samples: int) -> None:
        """A step was made; so many samples were seen by then."""
        made, free = len(self._lengths) + 1, self._samples and not self._clock.exact
        synchronizes = made < self._first + self._traced or (made + 1) % EVERY == 0
        if free and synchronizes:  # what is still to do belongs to this step and not to the next
            self._clock.wait()
        self._note(samples, free)
        if self._samples:
            self._clock.exact = synchronizes
        if self._traced:
            self._trace(made)

    def _note(self, samples: int, free: bool) -> None:
        before, self._totals = self._totals, self._clock.stopped()
        last, seconds = self._last, sum(training_phases(self._totals).values())
        length = seconds - last.seconds
        self._lengths.append(length)
        self._free.append(free)
        if not self._samples:
            self._last = Mark(samples, seconds, self._totals, last.synchronized + 1, (samples, seconds))
        elif free:
            ran = (last.free[0] + samples - last.samples, last.free[1] + length)
            self._last = last._replace(samples=samples, seconds=seconds, free=ran)
        else:
            spent = {name: total + self._totals[name] - before[name] for name, total in last.totals.items()}
            self._last = Mark(samples, seconds, spent, last.synchronized + 1, last.free)
        if len(self._marks) <= self._first:
            self._marks.append(self._last)

    def _trace(self, made: int) -> None:
        clock = self._clock
        if clock.trace is not None:
            self.traced.append(_joined(clock.trace))
        clock.trace = [] if self._first <= made < self._first + self._traced else None

    @property
    def step_times(self) -> StepTimes | None:
        """Of the steps of this sitting without the first; none where there was no step."""
        since, lengths = self._base()
        if since is None:
            return None
        spent = training_phases(self._last.totals)
        low = high = lengths[0]
        if len(lengths) > 1:  # inclusive: else a quantile of few steps lies beyond the quickest, even below 0
            low, *_, high = statistics.quantiles(lengths, n=10, method="inclusive")
        synchronized = self._last.synchronized - since.synchronized
        return StepTimes(
            steps=len(self._lengths) - self._left_out,
            mean=sum(lengths) / len(lengths),
            low=low,
            median=statistics.median(lengths),
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
        """Of the steps of this sitting without the first."""
        since, _ = self._base()
        if since is None:
            return None
        last = self._last
        samples, seconds = last.free[0] - since.free[0], last.free[1] - since.free[1]
        if not samples:  # so few steps that each was synchronized
            samples, seconds = last.samples - since.samples, last.seconds - since.seconds
        return samples / seconds if seconds > 0 else None

    def _base(self) -> tuple[Mark | None, array[float]]:
        """Where counting begins, and the lengths from there that count."""
        left_out = self._left_out
        lengths = self._lengths[left_out:]
        free = array("d", (length for length, ran in zip(lengths, self._free[left_out:], strict=True) if ran))
        return (self._marks[left_out] if lengths else None), free or lengths

    @property
    def _left_out(self) -> int:
        return min(self._first, len(self._lengths) // 4)


def _joined(spans: list[Span]) -> list[Span]:
    """Neighbors of one phase as one, so that looking at the clock leaves no trace."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].phase == span.phase:
            joined[-1] = Span(span.phase, joined[-1].begin, span.end)
        elif span.end > span.begin:
            joined.append(span)
    return joined[:MOST]


def timeline(traced: list[list[list[Span]]], hosts: list[str], together: bool) -> list[list[Span]]:
    """What every rank did in one step, or in all that were traced where they do not step together.

    Of steps that all make together it is the one of median length. Clocks of different hosts do not agree:
    each host's first moment is taken as the same.
    """
    if not any(traced):
        return []
    if together:
        number = _median_step(next(steps for steps in traced if steps))
        shown = [steps[number] if number < len(steps) else [] for steps in traced]
    else:
        shown = [[span for step in steps for span in step] for steps in traced]
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


def _median_step(steps: list[list[Span]]) -> int:
    lengths = [step[-1].end - step[0].begin if step else 0.0 for step in steps]
    return sorted(range(len(steps)), key=lambda number: lengths[number])[len(steps) // 2]
