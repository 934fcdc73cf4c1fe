"""How long a rank's steps take and what it does in some of them: read from its clock alone (law 7)."""

from __future__ import annotations

import statistics
from array import array
from typing import NamedTuple

from manyhands.clock import Clock, Span, training_phases
from manyhands.record import Pace

WARM_UP = 5  # steps that say nothing: memory is fetched, kernels are chosen
TRACED = 5  # steps after them whose phases are kept one by one
MOST = 400  # spans of a step: a picture has no room for more


class Mark(NamedTuple):
    """Where a rank stood after one of its first steps."""

    samples: int
    seconds: float
    totals: dict[str, float]


class Pacer:
    """Told after each step; keeps its length, and of some steps every change of phase.

    `first` steps are left out of means: fewer where the whole sitting is short.
    """

    def __init__(self, clock: Clock, first: int = WARM_UP, traced: int = TRACED) -> None:
        self._clock, self._first, self._traced = clock, first, traced
        self._marks: list[Mark] = []
        self._lengths = array("d")
        self.traced: list[list[Span]] = []

    def begin(self, samples: int) -> None:
        """Steps are made from here on."""
        self._marks = [self._mark(samples)]
        self._last = self._marks[0]
        self._lengths = array("d")

    def stepped(self, samples: int) -> None:
        """A step was made; so many samples were seen by then."""
        here = self._mark(samples)
        self._lengths.append(here.seconds - self._last.seconds)
        self._last = here
        if len(self._marks) <= self._first:
            self._marks.append(here)
        if self._traced:
            self._trace(len(self._lengths))

    def _trace(self, made: int) -> None:
        clock = self._clock
        if clock.trace is not None:
            self.traced.append(_joined(clock.trace))
        clock.trace = [] if self._first <= made < self._first + self._traced else None

    @property
    def pace(self) -> Pace | None:
        """Of the steps of this sitting without the first; none where there was no step."""
        since, lengths = self._base()
        if since is None:
            return None
        spent = training_phases(self._last.totals)
        low, *_, high = statistics.quantiles(lengths, n=10) if len(lengths) > 1 else (lengths[0],) * 9
        return Pace(
            steps=len(lengths),
            mean=sum(lengths) / len(lengths),
            low=low,
            median=statistics.median(lengths),
            high=high,
            phases={
                name: (seconds - since.totals[name]) / len(lengths)
                for name, seconds in spent.items()
                if seconds > since.totals[name]
            },
        )

    @property
    def samples_per_second(self) -> float | None:
        """Of the steps of this sitting without the first."""
        since, _ = self._base()
        seconds = self._last.seconds - since.seconds if since is not None else 0.0
        return (self._last.samples - since.samples) / seconds if since is not None and seconds > 0 else None

    def _base(self) -> tuple[Mark | None, array[float]]:
        """Where counting begins, and the lengths from there."""
        made = len(self._lengths)
        left_out = min(self._first, made // 4)
        return (self._marks[left_out] if made else None), self._lengths[left_out:]

    def _mark(self, samples: int) -> Mark:
        totals = self._clock.stopped()
        return Mark(samples, sum(training_phases(totals).values()), totals)


def _joined(spans: list[Span]) -> list[Span]:
    """Neighbours of one phase as one, so that looking at the clock leaves no trace."""
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
