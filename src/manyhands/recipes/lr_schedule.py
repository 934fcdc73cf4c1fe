"""A schedule is the learning rate as a function of samples seen, and of nothing else (law 2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.records.user_names import short_name

LearningRate = Callable[[int], float]
"""From samples seen to a learning rate."""

Decay = Literal["none", "step", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warm-up times decay, all lengths in samples.

    ```
    peak            ________            step: times `factor` at each milestone
                   /        |___        cosine: half a wave from the end of the warm-up to 0 at the horizon
    start         /             |___
                  0  warmup      horizon
    ```
    The two are multiplied, so a milestone may lie inside the warm-up.
    """

    start: float
    peak: float
    warmup: int
    horizon: int
    decay: Decay
    milestones: tuple[int, ...]
    factor: float

    def __call__(self, samples: int) -> float:
        """The learning rate of the step that begins after `samples` samples. After the horizon it stays."""
        seen = min(samples, self.horizon)
        return self._warm(seen) * self._decayed(seen)

    def _warm(self, seen: int) -> float:
        if seen >= self.warmup:
            return self.peak
        # rounding must not lift the learning rate above the peak
        return min(self.peak, self.start + (self.peak - self.start) * (seen / self.warmup))

    def _decayed(self, seen: int) -> float:
        if self.decay == "step":
            passed = sum(seen >= milestone for milestone in self.milestones)
            return self.factor**passed
        # after a warm-up as long as the run there is no decay
        if self.decay == "cosine" and self.warmup < self.horizon and seen > self.warmup:
            done = (seen - self.warmup) / (self.horizon - self.warmup)
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0


@dataclass(frozen=True)
class Constant:
    """The same learning rate always."""

    lr: float

    def __call__(self, samples: int) -> float:
        return self.lr


@dataclass(frozen=True)
class OwnSchedule:
    """A function of the user's, whose answers are checked."""

    name: str
    function: Callable[[int], Any]

    def __call__(self, samples: int) -> float:
        """The learning rate after this many samples: a number of at least 0."""
        found = self.function(samples)
        try:
            lr = math.nan if isinstance(found, str | bytes) else float(found)
        except (TypeError, ValueError):
            lr = math.nan
        if not (lr >= 0 and math.isfinite(lr)):
            raise ManyhandsError(
                f"the schedule {self.name} returns {found!r:.60} after {samples:,} samples, not a learning "
                "rate: it must be a number of at least 0"
            )
        return lr

    def check(self, epoch: int) -> None:
        """Refuse a function that does not work at the beginning and after an epoch of so many samples."""
        try:
            self(0)
            self(epoch)
        except Exception as error:
            why = str(error) if isinstance(error, ManyhandsError) else f"{type(error).__name__}: {error}"
            begin = "" if isinstance(error, ManyhandsError) else f"the schedule {self.name} fails: "
            raise UsageError(f"{begin}{why}") from error

    def describe(self) -> str:
        """What is said of the learning rate: `lr from mine, 0.1 at the start`."""
        return f"lr from {short_name(self.name)}, {self(0):.4g} at the start"
