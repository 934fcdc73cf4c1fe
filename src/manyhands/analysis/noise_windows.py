"""The noise scale of one run: tr(S)/|G|^2 in windows of a few evaluations, averaged over steps.

Training with batch B makes S = sum over the steps of an ideal run of (1 + B_noise(s)/B) steps, so the
critical batch is the mean over steps of the ratio (McCandlish et al. 2018). The ratio of sums over a whole
run is not: |G|^2 falls 50-fold on the way, and the first steps would decide it.

Estimates of |G|^2 are unbiased but noisy, most of all where the batch is small, and may be negative:

    |G|^2   2.3  0.9  0.6 | 0.2  0.5  0.5 | 0.6 -0.7  0.0  0.6 -0.3  0.4 |     per evaluation
                1.3       |      0.4      |             0.1              |     per window

A window takes in evaluations until its mean is well above its noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from manyhands.records.record import RunRecord

FEWEST = 3  # evaluations in a window
STEPS = 10  # in a window: the ratio of fewer has a distribution with heavy tails
CLEAR = 2.0  # standard errors by which |G|^2 must exceed 0 in a window
SPIKE = 10.0  # times the median |tr(S)|: where the loss jumps, it is a difference of two huge norms
MEDIAN = 0.954  # the median distance of two normal values, in their standard deviation


class Measured(NamedTuple):
    """What the meter saw since the previous evaluation."""

    samples: int  # at its end
    steps: int
    gradient: float  # mean estimate of |G|^2
    spread: float  # mean estimate of tr(S)


class Window(NamedTuple):
    """Some successive evaluations; the ratio of their means is B_noise there."""

    samples: int  # in the middle
    steps: int
    ratio: float
    error: float  # the standard error of the ratio, relative


class RunScale(NamedTuple):
    """The mean over steps of a run's B_noise, and its relative standard error from the windows."""

    scale: float
    error: float
    windows: tuple[Window, ...]


def measured(record: RunRecord, until: float | None = None) -> list[Measured]:
    """What was measured up to the evaluation that ends at or after `until` samples."""
    found, step, before = [], 0, 0
    for point in record.curve:
        if until is not None and before >= until:
            break
        if point.noise is not None and point.step > step:
            found.append(Measured(point.samples, point.step - step, *point.noise))
        step, before = point.step, point.samples
    return found


def run_scale(values: Sequence[Measured]) -> RunScale | None:
    """The mean over steps of the ratio; None if the gradient was never told from its noise."""
    found = windows(_without_spikes(values))
    if not found:
        return None
    steps = sum(window.steps for window in found)
    shares = [(window.steps / steps * window.ratio, window.error) for window in found]
    mean = math.fsum(share for share, _ in shares)
    error = math.sqrt(math.fsum((share * error) ** 2 for share, error in shares)) / mean
    return RunScale(mean, error, tuple(found))


def windows(values: Sequence[Measured]) -> list[Window]:
    """Cut a run into windows; a rest that cannot stand alone belongs to the last of them."""
    noise = _Noise(values)
    groups: list[list[Measured]] = []
    current: list[Measured] = []
    for each in values:
        current.append(each)
        if _window(current, noise) is not None:
            groups.append(current)
            current = []
    if current:
        while groups and _window(groups[-1] + current, noise) is None:
            current = groups.pop() + current
        groups = [*groups[:-1], groups[-1] + current] if groups else [current]
    found = [_window(group, noise) for group in groups]
    return [window for window in found if window is not None]


def _without_spikes(values: Sequence[Measured]) -> list[Measured]:
    usual = statistics.median(abs(each.spread) for each in values) if values else 0.0
    return [each for each in values if abs(each.spread) <= SPIKE * usual]


class _Noise:
    """How far neighboring evaluations lie apart, in units of tr(S), with which their noise grows.

    Between neighbors the truth hardly changes; the median leaves out the start, where it does.
    """

    def __init__(self, values: Sequence[Measured]) -> None:
        around = [(one, other, (one.spread + other.spread) / 2) for one, other in pairwise(values)]
        self._apart = [
            ((other.gradient - one.gradient) / level, (other.spread - one.spread) / level)
            for one, other, level in around
            if level > 0
        ]

    @property
    def of_gradient(self) -> float:
        """The standard deviation of one estimate of |G|^2."""
        return self._typical([abs(gradient) for gradient, _ in self._apart])

    def of_ratio(self, ratio: float) -> float:
        """The relative standard deviation of one ratio: its two estimates err in opposite directions."""
        return self._typical([abs(spread - ratio * gradient) for gradient, spread in self._apart])

    @staticmethod
    def _typical(distances: Sequence[float]) -> float:
        return statistics.median(distances) / MEDIAN if distances else 0.0


def _window(group: Sequence[Measured], noise: _Noise) -> Window | None:
    """The window of these evaluations; None if they are too few, or too noisy."""
    steps = sum(each.steps for each in group)
    if len(group) < FEWEST or steps < STEPS:
        return None
    gradient = math.fsum(each.steps * each.gradient for each in group) / steps
    spread = math.fsum(each.steps * each.spread for each in group) / steps
    root = math.sqrt(len(group))
    if spread <= 0 or gradient <= 0 or gradient < CLEAR * noise.of_gradient * spread / root:
        return None
    ratio = spread / gradient
    middle = (group[0].samples + group[-1].samples) // 2
    return Window(middle, steps, ratio, noise.of_ratio(ratio) / root)
